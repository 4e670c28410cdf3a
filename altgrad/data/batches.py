"""Batches as pure functions: the seed, the step and the micro-batch decide which tokens a step sees.

No sampler has to be saved or restored. An interrupted run sees the same data as an uninterrupted run, and all arms of a
comparison see the same data. Language models read windows of the token file, as in nanoGPT: windows start anywhere, are
drawn with replacement, and may cross from one document into the next.

Classifiers read documents in pieces of ``context`` tokens, from each document's start. ``<|endoftext|>``, which no text
contains, fills up the last piece: a document ends at the first ``<|endoftext|>`` of a piece.

The random numbers are raw output of Philox (Salmon et al. 2011), a counter-based generator. Its key is (seed, step),
and the top word of its counter is the micro-batch, so no two streams overlap. NumPy promises never to change the raw
stream of a bit generator; it does not promise this for ``Generator``.

A task is a class here (`Language` or `Classification`) with ``vocab_size``, ``labels``, ``batch`` and ``sample``.
``labels`` is the weight in the loss of a positive of each label, empty for a language model. ``batch`` and ``sample``
return inputs, int64 (n, context), and targets: int64 of the same shape, or float32 (n, labels).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch import Tensor

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.tasks import Classifier
from altgrad.data import Split

DTYPE = np.dtype("<u2")
TruthAndScores = tuple[np.ndarray, np.ndarray]


class TokenFile:
    """One split of a tokenized corpus, mapped into memory.

    ``tokens`` is a read-only uint16 array of shape (len(self),). `altgrad.data.tokens.write_tokens` makes the folder.
    Raises :class:`UserError` if the split is missing there, or its file has another size than ``meta.json`` says.
    """

    def __init__(self, directory: Path, split: str) -> None:
        meta = read_json(directory / "meta.json")
        path = directory / f"{split}.bin"
        if split not in meta["splits"]:
            raise UserError(f"{directory} has no split {split!r}{did_you_mean(split, meta['splits'])}")
        expected = meta["splits"][split]["tokens"] * DTYPE.itemsize
        present = path.stat().st_size if path.is_file() else 0
        if meta["dtype"] != "uint16" or present != expected:
            raise UserError(
                f"{path} holds {present} bytes where meta.json says {expected} of {meta['dtype']}; "
                "delete the folder and tokenize again"
            )
        self.split = split
        self.vocab_size: int = meta["vocab_size"]
        self.tokens = np.memmap(path, dtype=DTYPE, mode="r")

    def __len__(self) -> int:
        return len(self.tokens)


def require_sequences(meta: dict[str, Any], context: int) -> None:
    """Raise :class:`UserError` unless train and val each have ``context + 1`` tokens, one sequence and its last target.

    ``meta`` is the content of ``meta.json``. Training and the validation sample each need one sequence.
    """
    train, val = (meta["splits"].get(split, {"tokens": 0})["tokens"] for split in ("train", "val"))
    if min(train, val) < context + 1:
        copies = f" ({meta['near_copies']} near copies were dropped)" if meta.get("near_copies") else ""
        raise UserError(
            f"corpus {meta['corpus']} is too small: it has {train} tokens to train on and {val} to validate on{copies}"
            f", and each needs context + 1 = {context + 1}; use a larger corpus or a smaller model.context"
        )


def training_batch(
    tokens: TokenFile, *, seed: int, step: int, micro: int, batch: int, context: int
) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), each int64 of shape (batch, context); targets are one token ahead.

    Equal arguments give equal tokens. Raises :class:`UserError` when the split has fewer than ``context + 1`` tokens.
    """
    starts = _require_window(tokens, context)
    # 64 random bits modulo the number of starts: uneven by less than one part in 10^9 up to 10^10 tokens.
    return _windows(tokens, raw_stream(seed, step, micro, batch) % np.uint64(starts), context)


def raw_stream(seed: int, step: int, micro: int, count: int) -> np.ndarray:
    """Return ``count`` random 64-bit numbers, uint64 (count,), for the micro-batch ``micro`` of ``step``."""
    stream = np.random.Philox(key=np.array([seed, step], np.uint64), counter=np.array([0, 0, 0, micro], np.uint64))
    return stream.random_raw(count)


def validation_sample(tokens: TokenFile, sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), int64 of shape (n, context): evenly spaced windows that do not overlap.

    Every call returns the same windows. ``n`` is ``sequences``, or the number of windows that fit into the split if
    this is smaller. Raises :class:`UserError` when no window fits.
    """
    starts = _require_window(tokens, context)
    count = min(sequences, (len(tokens) - 1) // context)
    # Exact integers: neighbours lie at least floor((starts - 1) / (count - 1)) >= context apart.
    return _windows(tokens, _evenly(count, starts), context)


def _evenly(count: int, total: int) -> np.ndarray:
    """Return ``count`` whole numbers below ``total``, evenly spaced from 0 to the last one."""
    return np.arange(count) * (total - 1) // max(1, count - 1)


def _windows(tokens: TokenFile, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    positions = starts.astype(np.int64)[:, None] + np.arange(context + 1)  # (batch, context + 1)
    windows = torch.from_numpy(tokens.tokens[positions].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _require_window(tokens: TokenFile, context: int) -> int:
    """Return how many windows of ``context + 1`` tokens the split has; raise :class:`UserError` if it has none."""
    if len(tokens) < context + 1:
        raise UserError(
            f"the {tokens.split} split has {len(tokens)} tokens, but one sequence needs context + 1 = "
            f"{context + 1}; use a larger corpus or a smaller model.context"
        )
    return len(tokens) - context


def read_labels(directory: Path, split: Split, count: int) -> np.ndarray:
    """Return which of ``count`` labels each document of ``split`` has: bool (documents, count).

    Raises :class:`UserError` if ``directory`` has no labels of the split.
    """
    lists = _label_table(directory, split)["labels"].combine_chunks()
    sizes = np.diff(lists.offsets.to_numpy())
    truth = np.zeros((len(lists), count), dtype=bool)
    truth[np.repeat(np.arange(len(lists)), sizes), lists.values.to_numpy()] = True
    return truth


def read_documents(directory: Path, split: Split) -> list[str]:
    """Return the corpus's name for each document of ``split``; raise :class:`UserError` as `read_labels` does."""
    return _label_table(directory, split)["document"].to_pylist()


def _label_table(directory: Path, split: Split) -> pyarrow.Table:
    path = directory / f"{split}.labels.parquet"
    if not path.is_file():
        raise UserError(f"{path} does not exist; run `dvc repro` to make it")
    return pyarrow.parquet.read_table(path)


class Pieces:
    """One split of a labelled corpus, read in the first ``task.chunks`` pieces of each document.

    ``truth``, bool (documents, labels), says which document has which label. ``labels`` has the labels' names, and
    ``documents`` the corpus's names for the documents.
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

        Each row is a random piece of a random document. Documents are drawn with replacement, all equally likely.
        """
        raw = raw_stream(seed, step, micro, 2 * batch)
        documents = (raw[:batch] % np.uint64(len(self.truth))).astype(np.int64)
        return self._read(documents, (raw[batch:] % self._pieces[documents].astype(np.uint64)).astype(np.int64))

    def sample(self, sequences: int | None = None) -> tuple[Tensor, Tensor, np.ndarray]:
        """Return (tokens, labels, owner) of all pieces of a fixed choice of documents.

        ``owner``, int (pieces,), is the number of each piece's document. The choice is all documents, or with
        ``sequences`` as many evenly spaced documents as have at most that many pieces, but at least one.
        """
        count = len(self.truth) if sequences is None else min(max(1, sequences // self._chunks), len(self.truth))
        chosen = _evenly(count, len(self.truth))
        owner = np.repeat(chosen, self._pieces[chosen])
        first = np.cumsum(self._pieces[chosen]) - self._pieces[chosen]
        return *self._read(owner, np.arange(len(owner)) - np.repeat(first, self._pieces[chosen])), owner

    def scores(self, model: Callable[[Tensor], Tensor], batch: int, sequences: int | None = None) -> TruthAndScores:
        """Return (truth, scores), bool and float32 (documents, labels), for the documents that `sample` chooses.

        A score is the mean of the model's logits over a document's pieces. The model gets ``batch`` pieces at a time.
        """
        inputs, _, owner = self.sample(sequences)
        documents, first, counts = np.unique(owner, return_index=True, return_counts=True)
        logits = torch.cat([model(part).float().cpu() for part in inputs.split(batch)]).double().numpy()
        return self.truth[documents], (np.add.reduceat(logits, first) / counts[:, None]).astype(np.float32)

    @property
    def share_read(self) -> float:
        """The share of the split's tokens that its pieces hold."""
        lengths = self._ends - self._starts
        return float(np.minimum(lengths, self._pieces * self.context).sum() / max(1, lengths.sum()))

    def _read(self, documents: np.ndarray, pieces: np.ndarray) -> tuple[Tensor, Tensor]:
        at = (self._starts[documents] + pieces * self.context)[:, None] + np.arange(self.context)
        ends = self._ends[documents][:, None]
        tokens = np.where(at < ends, self._file.tokens[np.minimum(at, ends)].astype(np.int64), self._end)
        return torch.from_numpy(tokens), torch.from_numpy(self.truth[documents].astype(np.float32))


def label_weights(directory: Path, task: Classifier) -> tuple[float, ...]:
    """Return the weight in the loss of a positive of each label.

    Each weight is 1. With ``task.class_weights`` it is the number of training documents without the label, divided by
    the number with it.
    """
    meta = read_json(directory / "meta.json")
    documents = meta["splits"]["train"]["documents"]
    counts = [label["train"] for label in meta["labels"]]
    return tuple(documents / count - 1 if task.class_weights else 1.0 for count in counts)


class Language:
    """The task of a language model: inputs are windows of text, and targets are one token ahead."""

    labels: tuple[float, ...] = ()

    def __init__(self, cell: Cell, directory: Path, split: Split) -> None:
        self._cell, self._tokens = cell, TokenFile(directory, split)
        self.vocab_size = self._tokens.vocab_size

    def batch(self, *, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of a micro-batch. The cell, ``step`` and ``micro`` decide its tokens."""
        cell = self._cell
        return training_batch(
            self._tokens, seed=cell.seed, step=step, micro=micro, batch=cell.train.batch, context=cell.model.context
        )

    def sample(self, sequences: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of a fixed sample of ``sequences`` windows, by default ``train.eval_sequences``."""
        cell = self._cell
        return validation_sample(self._tokens, sequences or cell.train.eval_sequences, cell.model.context)


class Classification:
    """The task of a classifier: inputs are pieces of documents, and targets are the documents' labels."""

    def __init__(self, cell: Cell, directory: Path, split: Split) -> None:
        assert cell.task is not None
        self._cell, self._directory, self._task = cell, directory, cell.task
        self.pieces = self.of(split)
        self.vocab_size, self.labels = self.pieces.vocab_size, label_weights(directory, cell.task)

    def of(self, split: Split) -> Pieces:
        return Pieces(self._directory, split, self._task, self._cell.model.context)

    def batch(self, *, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of a micro-batch. The cell, ``step`` and ``micro`` decide its pieces."""
        return self.pieces.batch(seed=self._cell.seed, step=step, micro=micro, batch=self._cell.train.batch)

    def sample(self, sequences: int | None = None) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of the pieces that the cell evaluates, or of at most ``sequences`` of them."""
        inputs, targets, _ = self.pieces.sample(self._cell.train.eval_sequences)
        chosen = _evenly(min(sequences or len(inputs), len(inputs)), len(inputs))
        return inputs[chosen], targets[chosen]


Task = Language | Classification


def task_of(cell: Cell, directory: Path, split: Split) -> Task:
    """Return the task of ``cell`` on the token files of ``split`` in ``directory``."""
    return (Classification if cell.task else Language)(cell, directory, split)
