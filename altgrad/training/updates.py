"""What a step did to the quantized weights: in rungs, and beside what AdamW would have done.

Rows (step, layer, ``update``, metric, value) of the steps that are watched, the metrics as ``altgrad.metrics`` says:

- ``rungs``: the mean over the layer;
- ``rungs_2^-6``: that over the weights with 2^-6 <= |w_old| < 2^-5, the ends taking in what lies beyond;
- ``cosine_adamw``, where the optimizer knows AdamW's update.

The weights are those that the optimizer keeps, float32 masters or values on the quantization grid. Where the format is
virtual, its rungs are counted as if the weights were in it, whatever finer values they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from altgrad.model import linear_layers
from altgrad.numerics.sums import sums_by_binade
from altgrad.optim import ArmOptimizer, WeightGrid
from altgrad.training.monitor import Row

LOWEST_BINADE, HIGHEST_BINADE = -16, 0


class UpdateMonitor:
    """Makes the rows of one optimizer's steps on the weights that ``grids`` has."""

    def __init__(self, model: nn.Module, optimizer: ArmOptimizer, grids: dict[nn.Parameter, WeightGrid]) -> None:
        self.optimizer = optimizer
        self.layers = {name: layer.weight for name, layer in linear_layers(model).items() if layer.weight in grids}
        self.grids = grids

    @contextmanager
    def watching(self, step: int, rows: list[Row]) -> Iterator[None]:
        """Append the rows of the step that is taken inside to ``rows``."""
        before = {name: (w.detach().clone(), self.grids[w].spacing(w.detach())) for name, w in self.layers.items()}
        yield
        for name, (old, spacing) in before.items():
            weight = self.layers[name]
            found = rungs_moved(old, weight.detach(), spacing)
            cosine = self._cosine(weight, old)
            if cosine is not None:
                found["cosine_adamw"] = cosine
            rows += [Row(step, name, "update", metric, value) for metric, value in found.items()]

    def _cosine(self, weight: nn.Parameter, old: Tensor) -> float | None:
        expected = self.optimizer.adamw_direction(weight)
        if expected is None:
            return None
        update = weight.detach() - old * self.optimizer.decay(weight)
        return -torch.cosine_similarity(update.flatten().double(), expected.flatten().double(), dim=0).item()


def rungs_moved(old: Tensor, new: Tensor, spacing: Tensor) -> dict[str, float]:
    """Return the mean rungs that weights moved, over all of them and by the binade in which they were.

    Args:
        old: weights before the step, any shape.
        new: after it.
        spacing: of the quantization grid at ``old``.
    """
    rungs = (new - old).abs() / spacing
    counts, totals = sums_by_binade(rungs, old, LOWEST_BINADE, HIGHEST_BINADE).tolist()
    found = {"rungs": sum(totals) / old.numel()}
    for i, (count, total) in enumerate(zip(counts, totals, strict=True)):
        if count:
            found[f"rungs_2^{i + LOWEST_BINADE}"] = total / count
    return found
