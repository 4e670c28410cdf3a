"""What a cell learns from: one seam for its batches, its validation sample and the labels of its head.

A task is a class here; where its results are more than a loss, its measures are in `altgrad.training.evaluation`. Each
has ``vocab_size``; ``labels``, what a positive of each label weighs, nothing for text; and gives inputs, int64
(n, context), with targets, int64 alike for text and float32 (n, labels) for labels.

A model that classifies reads documents in pieces of ``context`` tokens: the tokens of a document from a multiple of
``context`` on. What is missing of a piece's length is ``<|endoftext|>``, which no text contains: the first one in a
piece is where its document ends. Batches are pure functions of seed, step and micro-batch, as those of
`altgrad.data.batches` are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.tasks import Classifier
from altgrad.data.batches import TokenFile, raw_stream, training_batch, validation_sample
from altgrad.data.corpora import Split
from altgrad.data.labels import read_documents, read_labels

TruthAndScores = tuple[np.ndarray, np.ndarray]


class Pieces:
    """One split: ``truth``, bool (documents, labels), and the first ``task.chunks`` pieces of each document.

    ``labels`` are the labels' names, ``documents`` what the corpus calls the documents.
    """

    def __init__(self, directory: Path, split: Split, task: Classifier, context: int) -> None:
        meta, self._file = read_json(directory / "meta.json"), TokenFile(directory, split)
        if "labels" not in meta:
            raise UserError(f"{directory} was tokenized without labels; run `dvc repro` with task: classify")
        self.vocab_size, self.context, self._chunks = self._file.vocab_size, context, task.chunks
        self.labels = [label["name"] for label in meta["labels"]]
        self.truth, self.documents = read_labels(directory, split, len(self.labels)), read_documents(directory, split)
        self._end = meta["endoftext"]
        self._ends = np.flatnonzero(self._file.tokens == self._end)
        self._starts = np.concatenate([[0], self._ends[:-1] + 1])
        if len(self._ends) != len(self.truth):
            raise UserError(f"{directory}: {split} has not as many documents as labels; delete it and tokenize again")
        self._pieces = np.minimum(task.chunks, np.maximum(1, -(-(self._ends - self._starts) // context)))

    def batch(self, *, seed: int, step: int, micro: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), int64 (batch, context) and float32 (batch, labels).

        Documents are drawn with replacement, each as likely, and of a document one of its pieces.
        """
        raw = raw_stream(seed, step, micro, 2 * batch)
        documents = (raw[:batch] % np.uint64(len(self.truth))).astype(np.int64)
        return self._of(documents, (raw[batch:] % self._pieces[documents].astype(np.uint64)).astype(np.int64))

    def sample(self, sequences: int | None = None) -> tuple[Tensor, Tensor, np.ndarray]:
        """Return all pieces of documents, evenly spaced: as `batch`, and whose each is, (pieces,).

        Of all documents, or of as many as have at most so many ``sequences``, and at least one.
        """
        count = len(self.truth) if sequences is None else min(max(1, sequences // self._chunks), len(self.truth))
        chosen = np.arange(count) * (len(self.truth) - 1) // max(1, count - 1)
        owner = np.repeat(chosen, self._pieces[chosen])
        first = np.cumsum(self._pieces[chosen]) - self._pieces[chosen]
        return *self._of(owner, np.arange(len(owner)) - np.repeat(first, self._pieces[chosen])), owner

    def scores(self, model: Callable[[Tensor], Tensor], batch: int, sequences: int | None = None) -> TruthAndScores:
        """Return what ``model`` says of documents, and the truth: bool and float32, (documents, labels).

        That is the mean of its logits over a document's pieces, which it gets in batches. Documents are as in `sample`.
        """
        inputs, _, owner = self.sample(sequences)
        own, first, counts = np.unique(owner, return_index=True, return_counts=True)
        logits = torch.cat([model(part).float().cpu() for part in inputs.split(batch)]).double().numpy()
        return self.truth[own], (np.add.reduceat(logits, first) / counts[:, None]).astype(np.float32)

    @property
    def share_read(self) -> float:
        """The share of the split's tokens that its pieces hold."""
        lengths = self._ends - self._starts
        return float(np.minimum(lengths, self._pieces * self.context).sum() / max(1, lengths.sum()))

    def _of(self, documents: np.ndarray, pieces: np.ndarray) -> tuple[Tensor, Tensor]:
        at = (self._starts[documents] + pieces * self.context)[:, None] + np.arange(self.context)
        ends = self._ends[documents][:, None]
        tokens = np.where(at < ends, self._file.tokens[np.minimum(at, ends)].astype(np.int64), self._end)
        return torch.from_numpy(tokens), torch.from_numpy(self.truth[documents].astype(np.float32))


def label_weights(directory: Path, task: Classifier) -> tuple[float, ...]:
    """Return what a positive of each label weighs in the loss: 1, or with class weights its negatives by positives."""
    meta = read_json(directory / "meta.json")
    documents = meta["splits"]["train"]["documents"]
    counts = [label["train"] for label in meta["labels"]]
    return tuple(documents / count - 1 if task.class_weights else 1.0 for count in counts)


class Language:
    """Windows of text; the targets are one token ahead."""

    labels: tuple[float, ...] = ()

    def __init__(self, cell: Cell, directory: Path, split: Split) -> None:
        self._cell, self._tokens = cell, TokenFile(directory, split)
        self.vocab_size = self._tokens.vocab_size

    def batch(self, *, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Return a micro-batch: a function of the cell and the arguments alone."""
        cell = self._cell
        return training_batch(
            self._tokens, seed=cell.seed, step=step, micro=micro, batch=cell.train.batch, context=cell.model.context
        )

    def sample(self, sequences: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the same sequences always, as many as the cell evaluates or so many, if there are."""
        cell = self._cell
        return validation_sample(self._tokens, sequences or cell.train.eval_sequences, cell.model.context)


class Classification:
    """Pieces of documents; the targets are the documents' labels."""

    def __init__(self, cell: Cell, directory: Path, split: Split) -> None:
        assert cell.task is not None
        self._cell, self._directory, self._task = cell, directory, cell.task
        self.pieces = self.of(split)
        self.vocab_size, self.labels = self.pieces.vocab_size, label_weights(directory, cell.task)

    def of(self, split: Split) -> Pieces:
        return Pieces(self._directory, split, self._task, self._cell.model.context)

    def batch(self, *, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Return a micro-batch: a function of the cell and the arguments alone."""
        return self.pieces.batch(seed=self._cell.seed, step=step, micro=micro, batch=self._cell.train.batch)

    def sample(self, sequences: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the pieces that the cell evaluates, the same always, or so many of these."""
        inputs, targets, _ = self.pieces.sample(self._cell.train.eval_sequences)
        count = min(sequences or len(inputs), len(inputs))
        chosen = np.arange(count) * (len(inputs) - 1) // max(1, count - 1)
        return inputs[chosen], targets[chosen]


Task = Language | Classification


def task_of(cell: Cell, directory: Path, split: Split) -> Task:
    """Return what ``cell`` learns from, in a split of the token files in ``directory``."""
    return (Classification if cell.task else Language)(cell, directory, split)
