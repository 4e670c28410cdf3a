"""Batches as pure functions: which tokens a step sees follows from (seed, step, micro-batch) alone.

There is no sampler to save or restore, so a run that was interrupted anywhere sees the same data as
one that was not, and every arm of a comparison sees the same batches. Windows start anywhere and are
drawn with replacement, as in nanoGPT; they may cross from one document into the next.

The random numbers are raw output of Philox (Salmon et al. 2011), a counter-based generator: its key
is (seed, step), the top word of its counter the micro-batch, so no two of these streams overlap. NumPy
keeps the raw stream of a bit generator the same for ever, which it does not promise of ``Generator``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import read_json

DTYPE = np.dtype("<u2")


class TokenFile:
    """One split of a tokenized corpus, mapped into memory.

    ``tokens`` is a read-only uint16 array of shape (len(self),). Raises :class:`UserError` when
    ``directory`` (as written by :func:`altgrad.data.write_tokens`) lacks the split, or when the file
    is not the one that its ``meta.json`` describes.
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
    """Raise :class:`UserError` unless train and val each have a sequence of ``context`` tokens and its last target.

    ``meta`` is the content of ``meta.json``. Training takes no less, and the validation sample makes do with it.
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

    A function of its arguments alone. Raises :class:`UserError` when the split has fewer than ``context + 1`` tokens.
    """
    starts = _require_window(tokens, context)
    # 64 random bits modulo the number of starts: uneven by less than one part in 10^9 up to 10^10 tokens.
    return _windows(tokens, raw_stream(seed, step, micro, batch) % np.uint64(starts), context)


def raw_stream(seed: int, step: int, micro: int, count: int) -> np.ndarray:
    """Return ``count`` numbers of 64 random bits, uint64, for a micro-batch."""
    stream = np.random.Philox(key=np.array([seed, step], np.uint64), counter=np.array([0, 0, 0, micro], np.uint64))
    return stream.random_raw(count)


def validation_sample(tokens: TokenFile, sequences: int, context: int) -> tuple[Tensor, Tensor]:
    """Return (inputs, targets), int64 of shape (n, context): evenly spaced windows that do not overlap.

    Always the same ones. ``n`` is ``sequences``, or as many windows as the split has room for when
    that is fewer. Raises :class:`UserError` when it has room for none.
    """
    starts = _require_window(tokens, context)
    count = min(sequences, (len(tokens) - 1) // context)
    # Exact integers: neighbours lie at least floor((starts - 1) / (count - 1)) >= context apart.
    return _windows(tokens, np.arange(count) * (starts - 1) // max(1, count - 1), context)


def _windows(tokens: TokenFile, starts: np.ndarray, context: int) -> tuple[Tensor, Tensor]:
    positions = starts.astype(np.int64)[:, None] + np.arange(context + 1)  # (batch, context + 1)
    windows = torch.from_numpy(tokens.tokens[positions].astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _require_window(tokens: TokenFile, context: int) -> int:
    """Return the number of places where a window of ``context + 1`` tokens can start."""
    if len(tokens) < context + 1:
        raise UserError(
            f"the {tokens.split} split has {len(tokens)} tokens, but one sequence needs context + 1 = "
            f"{context + 1}; use a larger corpus or a smaller model.context"
        )
    return len(tokens) - context
