"""What a step did to the weights: how far they moved, and what became of it on their quantization grid.

Rows (step, layer, ``update``, metric, value) of the steps that are watched, the metrics as ``altgrad.metrics`` says:

- ``update_l2`` and ``update_size``, of every layer. The rest is of layers with a quantization grid:
- ``rungs``: the mean over the layer;
- ``rungs_2^-6``: that over the weights with 2^-6 <= |w_old| < 2^-5, the ends taking in what lies beyond;
- ``stall_ratio``, ``update_success`` and ``representability_gap``;
- ``cosine_adamw``, where the optimizer knows AdamW's update.

The weights are those that the optimizer keeps, float32 masters or values on the quantization grid. Where the format is
virtual, its rungs are counted as if the weights were in it, whatever finer values they have; codes are those of the
finer quantization grid on which they lie, or of the format's own for masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from altgrad.model import linear_layers
from altgrad.numerics.sums import magnitudes
from altgrad.numerics.update_sums import LOWEST_BINADE, UpdateSums, update_sums
from altgrad.optim import ArmOptimizer, WeightGrid
from altgrad.optim.sharded import gather_full
from altgrad.training.monitor import Row


class _Before(NamedTuple):
    """A weight before the step, its scale there, and where the step wants it; None for what it has not."""

    weight: Tensor
    scale: Tensor | None
    wanted: Tensor | None


class UpdateMonitor:
    """Makes the rows of one optimizer's steps; ``grids`` has the weights with a quantization grid.

    Of weights that processes have parts of each makes the rows of the whole, so all of them must watch together.
    """

    def __init__(self, model: nn.Module, optimizer: ArmOptimizer, grids: dict[nn.Parameter, WeightGrid]) -> None:
        self.optimizer = optimizer
        self.layers = {name: layer.weight for name, layer in linear_layers(model).items()}
        self.grids = grids

    @contextmanager
    def watching(self, step: int, rows: list[Row]) -> Iterator[None]:
        """Append the rows of the step that is taken inside to ``rows``."""
        before = {name: self._before(w) for name, w in self.layers.items() if w.grad is not None}
        yield
        for name, old in before.items():
            weight = self.layers[name]
            new = gather_full(weight).detach()
            found = moved(old.weight, new)
            if old.scale is not None:
                found |= self._on_grid(weight, old, new)
            rows += [Row(step, name, "update", metric, value) for metric, value in found.items()]

    def _before(self, weight: nn.Parameter) -> _Before:
        old = gather_full(weight).detach().clone()
        if weight not in self.grids:
            return _Before(old, None, None)
        return _Before(old, self.grids[weight].scale(old), self.optimizer.wanted(weight))

    def _on_grid(self, weight: nn.Parameter, old: _Before, new: Tensor) -> dict[str, float]:
        assert old.scale is not None
        grid = self.grids[weight]
        sums = update_sums(
            old.weight, new, new if old.wanted is None else old.wanted, gather_full(weight.grad), old.scale,
            grid.scale(new), grid.constants, grid.refinement,
        )  # fmt: skip
        found = update_statistics(sums)
        cosine = self._cosine(weight, old.weight, new)
        return found if cosine is None else found | {"cosine_adamw": cosine}

    def _cosine(self, weight: nn.Parameter, old: Tensor, new: Tensor) -> float | None:
        expected = self.optimizer.adamw_direction(weight)
        if expected is None:
            return None
        update = new - old * self.optimizer.decay(weight)
        return -torch.cosine_similarity(update.flatten().double(), expected.flatten().double(), dim=0).item()


def moved(old: Tensor, new: Tensor) -> dict[str, float]:
    """Return how far weights moved from ``old`` to ``new``, both finite and of any shape."""
    size, whole = (magnitudes(t).squares ** 0.5 for t in (new - old, old))
    return {"update_l2": size} | ({"update_size": size / whole} if whole > 0 else {})


def update_statistics(sums: UpdateSums) -> dict[str, float]:
    """Return what is recorded of a weight's step on its quantization grid, leaving out what has no denominator."""
    count = sum(sums.counts)
    found = {"rungs": sum(sums.rungs) / count, "representability_gap": sums.gap / count}
    if sums.wanted:
        found["stall_ratio"] = sums.stalled / sums.wanted
    if sums.flips:
        found["update_success"] = sums.descending / sums.flips
    for i, (number, total) in enumerate(zip(sums.counts, sums.rungs, strict=True)):
        if number:
            found[f"rungs_2^{i + LOWEST_BINADE}"] = total / number
    return found
