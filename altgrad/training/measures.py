"""What is measured of a model besides its loss: of a classifier, how well it finds labels.

While it trains that is of the validation documents whose loss is taken too, with the best thresholds for them. At its
end thresholds are chosen on all validation documents, and the test documents, seen by nothing before, are judged by
them; ``scores.safetensors`` then holds what all of these metrics are made of.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from altgrad.config import Cell
from altgrad.config.tasks import ON_TEST, ON_VALIDATION, TITLES
from altgrad.data.pieces import Pieces, TruthAndScores
from altgrad.data.splits import Split
from altgrad.data.tasks import Classification, Task
from altgrad.training.records import write_tensors

LARGEST_EXPONENT = 709.0  # beyond it exp() leaves float64


class LossAlone:
    """The measures of a language model: none but its loss."""

    columns: tuple[str, ...] = ()

    def now(self) -> list[float | None]:
        """Return what is measured while it trains, in the order of ``columns``."""
        return []

    def final(self, val_loss: float | None, out: Path) -> dict[str, Any]:
        """Return what ``metrics.json`` says besides the loss, which is None of a run that diverged."""
        return {"perplexity": None if val_loss is None else math.exp(min(val_loss, LARGEST_EXPONENT))}


class Found:
    """How well ``model`` finds the labels of ``task``, evaluated in ``compute``: bf16 or float32."""

    columns = tuple(ON_VALIDATION.values())

    def __init__(self, cell: Cell, model: nn.Module, task: Classification, device: torch.device, compute: str) -> None:
        assert cell.task is not None
        self._model, self._task, self._device, self._compute = model, task, device, compute
        self._sequences, self._batch = cell.train.eval_sequences, cell.train.batch
        self._thresholds = cell.task.thresholds

    def now(self) -> list[float | None]:
        """Return the metrics of the evaluated documents; None where a score is not finite, or but one label there."""
        from altgrad.data.classification import choose_thresholds, classification_metrics  # which loads scikit-learn

        truth, scores = self._scores(self._task.pieces, self._sequences)
        kept = truth.any(axis=0)  # a sample may lack a label
        if not np.isfinite(scores).all() or kept.sum() < 2:
            return [None] * len(TITLES)
        truth, scores = truth[:, kept], scores[:, kept]
        found = classification_metrics(truth, scores, choose_thresholds(truth, scores, self._thresholds))
        return [found[name] for name in TITLES]

    def final(self, val_loss: float | None, out: Path) -> dict[str, Any]:
        """Return the metrics of validation and test documents, and write the scores that they are of to ``out``."""
        from altgrad.data.classification import choose_thresholds, classification_metrics

        metrics: dict[str, Any] = dict.fromkeys(["perplexity", *ON_VALIDATION.values(), *ON_TEST.values()])
        metrics["read_frac"] = self._task.of("test").share_read
        if val_loss is None:
            return metrics
        columns: dict[Split, dict[Any, str]] = {"val": ON_VALIDATION, "test": ON_TEST}
        found = {split: self._scores(self._task.of(split)) for split in columns}
        if not all(np.isfinite(scores).all() for _, scores in found.values()):
            return metrics
        thresholds = choose_thresholds(*found["val"], self._thresholds)
        tensors = {"thresholds": torch.from_numpy(thresholds)}
        for split, (truth, scores) in found.items():
            tensors |= {f"{split}/truth": torch.from_numpy(truth), f"{split}/scores": torch.from_numpy(scores)}
            values = classification_metrics(truth, scores, thresholds)
            metrics |= {columns[split][name]: value for name, value in values.items()}
        write_tensors(out / "scores.safetensors", tensors)
        return metrics

    def _scores(self, pieces: Pieces, sequences: int | None = None) -> TruthAndScores:
        self._model.eval()
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._compute == "bf16"):
            found = pieces.scores(lambda tokens: self._model(tokens.to(self._device)), self._batch, sequences)
        self._model.train()
        return found


def measures_of(
    cell: Cell, model: nn.Module, task: Task, device: torch.device, compute: str
) -> LossAlone | Found:  # fmt: skip
    """Return what is measured of a cell's model besides its loss; ``task`` is of its validation split."""
    return Found(cell, model, task, device, compute) if isinstance(task, Classification) else LossAlone()
