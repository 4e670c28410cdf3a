"""Codebooks: a format's values and thresholds as float32 tables, in which optimizer states are encoded."""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from altgrad.formats.floats import FloatFormat
from altgrad.formats.format import Format, in_float32
from altgrad.formats.registry import get_format

#: Upper limit of `Codebook.largest`: beyond it the float32 scale of a small tensor would not be a normal number.
LARGEST = 2.0**64


@dataclass(frozen=True, eq=False)
class Codebook:
    """The values of a format's codes, as an optimizer state has them.

    Attributes:
        fmt: the format.
        values: values of codes 0, 1, ..., ascending: float32, (n,). Magnitudes if codes have a sign bit.
        thresholds: the smallest float32 that is rounded to code 1, 2, ...: float32, (n - 1,).
        sign_code: the sign bit as a number, such as 0x80; 0 for a `TableFormat`, whose codes here are the places of its
            values.
    """

    fmt: Format
    values: np.ndarray
    thresholds: np.ndarray
    sign_code: int = 0

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.fmt.bits

    @property
    def largest(self) -> float:
        """The scaling target: the largest value, but at most `LARGEST`."""
        return min(float(self.values[-1]), LARGEST)

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        return float(self.values[self.values > 0][0])

    @cached_property
    def code_values(self) -> np.ndarray:
        """The value of every code that is a finite number, 0 for the others: float32, (2^bits,)."""
        table: np.ndarray = np.pad(self.values, (0, (1 << self.bits) - len(self.values)))
        if self.sign_code:
            table = np.nan_to_num(self.fmt.code_values, nan=0, posinf=0, neginf=0).astype(np.float32)
        return table


@cache
def codebook(fmt: str | Format) -> Codebook:
    """Return the codebook of a format or its name; ``ValueError`` if float32 cannot hold one of its values."""
    fmt = get_format(fmt)
    values, sign_code = fmt.values, 0
    if isinstance(fmt, FloatFormat):
        values, sign_code = fmt.magnitudes, fmt.sign_code
    values, thresholds = in_float32(values, fmt.thresholds[1 - len(values) :])
    if not fmt.fits(24, -149, 127):
        raise ValueError(f"{fmt.name} has values that no float32 is")
    return Codebook(fmt, values, thresholds, sign_code)
