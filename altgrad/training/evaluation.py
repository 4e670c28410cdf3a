"""The loss on the fixed validation sample, the check of the compiled graph, and the metrics of a classifier's labels.

While a classifier trains, its metrics are measured on the sample's validation documents, with the best thresholds for
these documents. At the end thresholds are chosen on all validation documents and applied to the test documents, which
are used nowhere before. ``scores.safetensors`` then holds the scores that all metrics are computed from, and
``predictions.csv`` has the same scores in a row per document.
"""

import csv
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from altgrad.common.errors import UserError
from altgrad.common.files import replacing
from altgrad.config import Cell
from altgrad.config.tasks import ON_TEST, ON_VALIDATION, TITLES
from altgrad.data import Split, label_text
from altgrad.data.batches import Classification, Pieces, Task, TruthAndScores
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.training import machine
from altgrad.training.ranks import Ranks
from altgrad.training.records import write_tensors

TOLERANCE = 0.01  # relative difference of the compiled loss; usually 1e-5, from sums rounded in another order
LARGEST_EXPONENT = 709.0  # beyond it exp() leaves float64


def perplexity(val_loss: float | None) -> float | None:
    """Return exp of a loss in nats per token; ``None`` for ``None``."""
    return None if val_loss is None else math.exp(min(val_loss, LARGEST_EXPONENT))


class Evaluation:
    """Computes the loss of ``model`` on the validation sample of ``task``, and the metrics of a classifier's labels.

    ``columns`` names the metrics that `label_metrics` returns while the model trains; a language model has none.
    ``loss_of`` is the ``model`` or its compiled graph. ``compute`` is the dtype of products: bf16 or float32.
    """

    def __init__(
        self, cell: Cell, model: nn.Module, task: Task, device: torch.device, compute: str, ranks: Ranks
    ) -> None:  # fmt: skip
        self._model, self._ranks = model, ranks
        self.loss_of: Callable[..., Tensor] = model
        self._device, self._compute = device, compute
        self._cell, self._task, self._batch = cell, task, cell.train.batch
        self.columns = tuple(ON_VALIDATION.values()) if isinstance(task, Classification) else ()
        self._sample = task.sample()
        self.seconds: list[float] = []  # of each batch

    def loss(self) -> float | None:
        """Return the mean loss of the sample in nats, per token or label; ``None`` if it is not finite.

        If training and evaluation mode compute the same function, the model stays in training mode, so that one
        compiled graph serves both.
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
        """Raise :class:`UserError` if the compiled graph and the model give different losses for one batch.

        A compiler's error would look like a format's divergence. The check is skipped if nothing is compiled, if the
        sample is smaller than a batch, or if evaluating twice would change the model's state.
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
        """Return the mean loss of a batch over all processes; ``batch`` is this process's share of it."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._compute == "bf16"):
            loss = loss_of(*(t.to(self._device) for t in batch))
        return self._ranks.sum(loss.detach() / self._ranks.count).item()

    def _is_as_in_training(self) -> bool:
        """Return whether training mode computes what evaluation does: no dropout, state or stochastic rounding."""
        changes = (module.changes for module in self._model.modules() if isinstance(module, Quantizer))
        return self._cell.model.dropout == 0 and not any(changes)

    def label_metrics(self) -> list[float | None]:
        """Return the metrics of the sample's documents in the order of `columns`.

        All are ``None`` if a score is not finite or the documents have fewer than two different labels.
        """
        from altgrad.data.labels import choose_thresholds, classification_metrics  # imports scikit-learn

        assert isinstance(self._task, Classification) and self._cell.task
        truth, scores = self._scores(self._task.pieces, self._cell.train.eval_sequences)
        occurring = truth.any(axis=0)
        if not np.isfinite(scores).all() or occurring.sum() < 2:
            return [None] * len(TITLES)
        truth, scores = truth[:, occurring], scores[:, occurring]
        thresholds = choose_thresholds(truth, scores, self._cell.task.thresholds)
        metrics = classification_metrics(truth, scores, thresholds)
        return [metrics[name] for name in TITLES]

    def final(self, val_loss: float | None, out: Path) -> dict[str, Any]:
        """Return the perplexity, or a classifier's metrics of validation and test documents.

        A classifier's scores are written to the folder ``out``. If its loss or a score is not finite, the metrics are
        ``None`` and nothing is written.
        """
        task = self._task
        if not isinstance(task, Classification):
            return {"perplexity": perplexity(val_loss)}
        from altgrad.data.labels import choose_thresholds, classification_metrics

        metrics: dict[str, Any] = dict.fromkeys(["perplexity", *ON_VALIDATION.values(), *ON_TEST.values()])
        metrics["read_frac"] = task.of("test").share_read
        if val_loss is None:
            return metrics
        columns: dict[Split, dict[Any, str]] = {"val": ON_VALIDATION, "test": ON_TEST}
        scored = {split: self._scores(task.of(split)) for split in columns}
        if not all(np.isfinite(scores).all() for _, scores in scored.values()):
            return metrics
        assert self._cell.task
        thresholds = choose_thresholds(*scored["val"], self._cell.task.thresholds)
        tensors = {"thresholds": torch.from_numpy(thresholds)}
        for split, (truth, scores) in scored.items():
            tensors |= {f"{split}/truth": torch.from_numpy(truth), f"{split}/scores": torch.from_numpy(scores)}
            values = classification_metrics(truth, scores, thresholds)
            metrics |= {columns[split][name]: value for name, value in values.items()}
        write_tensors(out / "scores.safetensors", tensors)
        table = out / "predictions.csv"
        with replacing(table) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(_predictions(task, scored, thresholds))
        return metrics

    def _scores(self, pieces: Pieces, sequences: int | None = None) -> TruthAndScores:
        self._model.eval()
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._compute == "bf16"):
            scores = pieces.scores(lambda tokens: self._model(tokens.to(self._device)), self._batch, sequences)
        self._model.train()
        return scores


def _predictions(
    task: Classification, scored: Mapping[Split, TruthAndScores], thresholds: np.ndarray
) -> Iterator[list[Any]]:
    """Yield the columns' names, then a row per document: true labels, predicted labels, and all scores (logits)."""
    names = np.array(task.pieces.labels, dtype=object)
    yield ["split", "document", "true", "predicted", *(f"score {name}" for name in names)]
    for split, (truth, scores) in scored.items():
        rows = zip(task.of(split).documents, truth, scores >= thresholds, scores, strict=True)
        for document, true, predicted, score in rows:
            yield [split, document, label_text(tuple(names[true])), label_text(tuple(names[predicted])), *score]
