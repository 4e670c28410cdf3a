"""What `codec.h` has to know of a moment that is stored as codes: the numbers of its codebook, and which it takes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from altgrad.formats.codebook import Codebook
from altgrad.numerics import loops
from altgrad.optim.coded import LEAST_AMAX, STREAMS, Coding

CHUNK = 512  # of the loops; a scale of another block than lies in it whole is measured in a pass of its own
TENSOR, ROW = 0, 1  # in place of the elements of a block, which are more
FIELDS = (
    "mapped", "bits", "mantissa_bits", "bias", "sign_code", "negative_zero", "root", "stochastic", "power_of_two",
    "block", "stream", "lowest", "entry", "entries", "largest", "spacing", "max",
)  # fmt: skip
HEADER = 32
_NUMBERS = {
    "header": HEADER, "chunk": CHUNK, "tensor": TENSOR, "row": ROW, "least_amax": float(np.float32(LEAST_AMAX))
}  # fmt: skip
DEFINITIONS = loops.enumeration("codec", FIELDS) + loops.numbers("codec", _NUMBERS)


def takes(coding: Coding) -> bool:
    """Whether the loops read and write such codes: in formats with a zero and in maps, of up to 8 bits."""
    moment, book = coding.moment, coding.book
    if book.fmt is None:
        return moment.rounding == "nearest" and not moment.expand
    return book.bits <= 8 and book.fmt.has_zero and book.smallest >= 2.0**-100


def measures(coding: Coding) -> bool:
    """Whether scales are of more than whole blocks in a chunk."""
    return coding.moment.granularity != "block" or CHUNK % coding.moment.block != 0


def packed(name: str, coding: Coding) -> Tensor:
    """Return the coding of the moment ``name``: float32, the header, values, and a map's table in bits, or
    with ``expand`` the logarithms, float64, of the codes' values over the largest."""
    moment, book, fmt = coding.moment, coding.book, coding.book.fmt
    lowest, entry, table = (0, 0, np.zeros(0, np.uint32)) if fmt else _table(book)
    fields = {
        "mapped": fmt is None, "bits": book.bits, "sign_code": book.sign_code, "negative_zero": book.negative_zero,
        "mantissa_bits": 0 if fmt is None else fmt.mantissa_bits, "bias": 0 if fmt is None else fmt.bias,
        "root": moment.root, "stochastic": moment.rounding == "stochastic", "power_of_two": moment.scale == "E8M0",
        "block": {"tensor": TENSOR, "row": ROW}.get(moment.granularity, moment.block),
        "stream": STREAMS[name] >> 29, "lowest": lowest >> 23, "entry": entry,
        "entries": len(table) // 2, "largest": book.largest, "max": float(book.values[-1]),
        "spacing": book.smallest,
    }  # fmt: skip
    size = 1 << book.bits
    numbers = np.zeros(HEADER + size, np.float32)
    numbers[: len(FIELDS)] = [fields[field] for field in FIELDS]
    numbers[HEADER:] = book.code_values
    if moment.expand:
        with np.errstate(divide="ignore"):
            table = np.log2(np.abs(book.code_values.astype(np.float64)) / book.largest)
    return torch.from_numpy(np.concatenate([numbers, table.view(np.float32)]))


def _table(book: Codebook) -> tuple[int, int, np.ndarray]:
    """Return the lowest magnitude's bits, those of an interval, and of each interval to 1, then of those below zero.

    Intervals are of numbers that have their upper bits in common, so few that each has a threshold at most. Their entry
    is the lowest code above ``entry`` bits, to which a threshold's lower bits, inverted below zero, are a carry short.
    """
    lowest, one = (int(np.float32(x).view(np.uint32)) for x in (2.0**-24, 1.0))
    for entry in range(17, 8, -1):
        starts = np.arange(lowest, one + 1, 1 << entry, dtype=np.uint32)
        ends = starts + np.uint32((1 << entry) - 1)
        ends[-1] = one
        low = np.concatenate([starts.view(np.float32), -ends.view(np.float32)])
        high = np.concatenate([ends.view(np.float32), -starts.view(np.float32)])
        codes, last = (np.searchsorted(book.thresholds, x, side="right") for x in (low, high))
        if (last - codes).max() <= 1:
            crossed, size = last > codes, 1 << entry
            limits = book.thresholds[np.minimum(codes, len(book.thresholds) - 1)].view(np.uint32) & (size - 1)
            carry = np.where(np.arange(len(codes)) < len(starts), size - limits, limits + 1)
            return lowest, entry, ((codes << entry) + np.where(crossed, carry, 0)).astype(np.uint32)
    raise ValueError(f"{book.name} has values closer together than its table can tell")
