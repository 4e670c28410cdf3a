"""The loss on the fixed validation sample, the check of the compiled graph, and how well a classifier finds labels.

While a classifier trains, its metrics are those of the validation documents of the sample, with the best thresholds for
them. At its end thresholds are chosen on all validation documents, and the test documents, used nowhere before, are
judged by them. ``scores.safetensors`` then holds the scores that all metrics are computed from, and ``predictions.csv``
the same in a row per document.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from altgrad.common.errors import UserError
from altgrad.config import Cell
from altgrad.config.tasks import ON_TEST, ON_VALIDATION, TITLES
from altgrad.data.batches import Classification, Pieces, Task, TruthAndScores
from altgrad.data.corpora import Split, label_text
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.training import machine
from altgrad.training.ranks import Ranks
from altgrad.training.records import write_csv, write_tensors

TOLERANCE = 0.01  # relative difference of the compiled loss; usual is 1e-5, since sums are rounded elsewhere
LARGEST_EXPONENT = 709.0  # beyond it exp() leaves float64


class Evaluation:
    """Evaluates ``loss_of``, the ``model`` or its compiled graph, with products in ``compute``: bf16 or float32."""

    def __init__(
        self, cell: Cell, model: nn.Module, task: Task, device: torch.device, compute: str, ranks: Ranks
    ) -> None:  # fmt: skip
        self._model, self._ranks = model, ranks
        self.loss_of: Callable[..., Tensor] = model
        self._device, self._compute = device, compute
        self._batch = cell.train.batch
        self._sample = task.sample()
        self._dropout = cell.model.dropout > 0
        self.seconds: list[float] = []  # of each batch

    def loss(self) -> float | None:
        """Return the mean loss in nats, per token or label; ``None`` if it is not finite.

        If training and evaluation compute the same function, the model stays in training mode, so that the compiled
        graph of training serves both.
        """
        inputs, targets = self._sample
        total, same = 0.0, self._is_as_in_training()
        self._model.train(same)
        with self._ranks.gathered(), torch.set_grad_enabled(same):
            for start in range(0, len(inputs), self._batch):
                batch = [t[start : start + self._batch] for t in (inputs, targets)]
                loss_of: Callable[..., Tensor] = self._model
                count = len(batch[0])
                if count == self._batch:  # each process evaluates the whole of a last, smaller batch
                    batch, loss_of = [self._ranks.share(t) for t in batch], self.loss_of
                began = time.perf_counter()
                total += self._of(loss_of, batch) * count
                self.seconds.append(time.perf_counter() - began)
        self._model.train()
        mean = total / len(inputs)
        return mean if math.isfinite(mean) else None

    def check_graph(self) -> None:
        """Raise :class:`UserError` where the compiled graph does not compute what the model does.

        A compiler's error would look like a format's divergence. One batch is evaluated both ways, unless that would
        change the model's state.
        """
        batch = [t[: self._batch] for t in self._sample]
        if self.loss_of is self._model or len(batch[0]) < self._batch or not self._is_as_in_training():
            return
        batch = [self._ranks.share(t) for t in batch]
        with self._ranks.gathered():
            compiled = self._of(self.loss_of, batch)
            with torch.no_grad():
                plain = self._of(self._model, batch)
        if math.isfinite(plain) and not abs(compiled - plain) <= TOLERANCE * abs(plain):
            raise UserError(
                f"the compiled model's first loss is {compiled:.6g} and the model's own {plain:.6g}: the C++ compiler "
                "made an error. Set train.compile to off, or CXX to another compiler, and delete "
                f"{machine.compile_cache(Path())}"
            )

    def _of(self, loss_of: Callable[..., Tensor], batch: list[Tensor]) -> float:
        """Return the loss of a batch, of which each process holds its share."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._compute == "bf16"):
            loss = loss_of(*(t.to(self._device) for t in batch))
        return self._ranks.sum(loss.detach() / self._ranks.count).item()

    def _is_as_in_training(self) -> bool:
        """Return whether the training mode drops, remembers and stochastically rounds nothing."""
        changes = (module.changes for module in self._model.modules() if isinstance(module, Quantizer))
        return not self._dropout and not any(changes)


class LossAlone:
    """The measures of a language model beside its loss: its perplexity, at the end."""

    columns: tuple[str, ...] = ()

    def now(self) -> list[float | None]:
        return []

    def final(self, val_loss: float | None, out: Path) -> dict[str, Any]:
        return {"perplexity": None if val_loss is None else math.exp(min(val_loss, LARGEST_EXPONENT))}


class LabelMetrics:
    """The measures of a classifier: how well ``model`` finds the labels of ``task``; products are in ``compute``."""

    columns = tuple(ON_VALIDATION.values())

    def __init__(self, cell: Cell, model: nn.Module, task: Classification, device: torch.device, compute: str) -> None:
        assert cell.task is not None
        self._model, self._task, self._device, self._compute = model, task, device, compute
        self._sequences, self._batch = cell.train.eval_sequences, cell.train.batch
        self._thresholds = cell.task.thresholds

    def now(self) -> list[float | None]:
        """Return the metrics of the sample's documents, ``None`` if a score is not finite or only one label occurs."""
        from altgrad.data.labels import choose_thresholds, classification_metrics  # which loads scikit-learn

        truth, scores = self._scores(self._task.pieces, self._sequences)
        occurring = truth.any(axis=0)
        if not np.isfinite(scores).all() or occurring.sum() < 2:
            return [None] * len(TITLES)
        truth, scores = truth[:, occurring], scores[:, occurring]
        metrics = classification_metrics(truth, scores, choose_thresholds(truth, scores, self._thresholds))
        return [metrics[name] for name in TITLES]

    def final(self, val_loss: float | None, out: Path) -> dict[str, Any]:
        """Return the metrics of validation and test documents, and write their scores to the folder ``out``."""
        from altgrad.data.labels import choose_thresholds, classification_metrics

        metrics: dict[str, Any] = dict.fromkeys(["perplexity", *ON_VALIDATION.values(), *ON_TEST.values()])
        metrics["read_frac"] = self._task.of("test").share_read
        if val_loss is None:
            return metrics
        columns: dict[Split, dict[Any, str]] = {"val": ON_VALIDATION, "test": ON_TEST}
        scored = {split: self._scores(self._task.of(split)) for split in columns}
        if not all(np.isfinite(scores).all() for _, scores in scored.values()):
            return metrics
        thresholds = choose_thresholds(*scored["val"], self._thresholds)
        tensors = {"thresholds": torch.from_numpy(thresholds)}
        for split, (truth, scores) in scored.items():
            tensors |= {f"{split}/truth": torch.from_numpy(truth), f"{split}/scores": torch.from_numpy(scores)}
            values = classification_metrics(truth, scores, thresholds)
            metrics |= {columns[split][name]: value for name, value in values.items()}
        write_tensors(out / "scores.safetensors", tensors)
        write_csv(out / "predictions.csv", self._predictions(scored, thresholds))
        return metrics

    def _predictions(self, scored: Mapping[Split, TruthAndScores], thresholds: np.ndarray) -> Iterator[list[Any]]:
        """Yield the columns' names, then a row per document: true labels, predicted labels, and all scores (logits)."""
        names = np.array(self._task.pieces.labels, dtype=object)
        yield ["split", "document", "true", "predicted", *(f"score {name}" for name in names)]
        for split, (truth, scores) in scored.items():
            rows = zip(self._task.of(split).documents, truth, scores >= thresholds, scores, strict=True)
            for document, true, predicted, score in rows:
                yield [split, document, label_text(tuple(names[true])), label_text(tuple(names[predicted])), *score]

    def _scores(self, pieces: Pieces, sequences: int | None = None) -> TruthAndScores:
        self._model.eval()
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._compute == "bf16"):
            scores = pieces.scores(lambda tokens: self._model(tokens.to(self._device)), self._batch, sequences)
        self._model.train()
        return scores


def measures_of(
    cell: Cell, model: nn.Module, task: Task, device: torch.device, compute: str
) -> LossAlone | LabelMetrics:  # fmt: skip
    """Return the measures of a cell's model beside its loss; ``task`` is of the validation split."""
    return LabelMetrics(cell, model, task, device, compute) if isinstance(task, Classification) else LossAlone()
