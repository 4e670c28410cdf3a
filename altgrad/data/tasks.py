"""What a cell learns from: one seam for its batches, its validation sample and the labels of its head.

A task is a class here; where its results are more than a loss, its measures are in `altgrad.training.measures`. Each
has ``vocab_size``; ``labels``, what a positive of each label weighs, nothing for text; and gives inputs, int64
(n, context), with targets, int64 alike for text and float32 (n, labels) for labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from altgrad.config import Cell
from altgrad.data.batches import TokenFile, training_batch, validation_sample
from altgrad.data.pieces import Pieces, label_weights
from altgrad.data.splits import Split


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
        """Return the pieces of a split."""
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
