"""What a number format is: values in ascending order, the thresholds between them, and a code for each value.

A number is rounded to the largest value whose threshold it reaches. `Format` is what all formats have in common. There
are two kinds: the values of a `FloatFormat` (`floats`) follow from its exponent and mantissa bits; those of a
`TableFormat` (`tables`), and the thresholds between them, are a table.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

import numpy as np

MAX_BITS = 16
SCALE_FORMATS = ("float32", "E8M0")  # of scales that have no tensor scale above them
STATISTICS = ("amax", "rms")

# Two operands scaled to the top of E6M1 or E7M0 would overflow the float32 accumulator of their matrix product, so a
# tensor's amax is scaled to 2^16 at most. No other float format of up to 8 bits reaches beyond that: E5M2 ends at
# 57344.
TARGET_CAP = 2.0**16


class Format(ABC):
    """A number format of at most 16 bits.

    Attributes:
        name: name in reports and messages.
        bits: width of a code.
        nan_code: code of the (quiet, positive) NaN, or None where there is none.
        inf_code: code of +Inf, or None where there is none.
        has_negative_zero: whether there is a code of -0.
        min_subnormal: smallest positive subnormal value, or None where there is none.
        half_step: largest relative rounding error of a float format's normal values; None for a table.
        scale_to: what a scale brings a tensor to: see `scale_target_of`.
    """

    name: str
    bits: int
    nan_code: int | None
    inf_code: int | None
    has_negative_zero: bool
    min_subnormal: float | None = None
    half_step: float | None = None
    scale_to: float | str

    @property
    @abstractmethod
    def values(self) -> np.ndarray:
        """All distinct finite values, ascending: float64, shape (n,), read-only. Zero appears once."""

    @property
    @abstractmethod
    def thresholds(self) -> np.ndarray:
        """The smallest float64 that is rounded to each value but the lowest: float64, (n - 1,), read-only."""

    @property
    def extended(self) -> tuple[np.ndarray, np.ndarray]:
        """`values` and `thresholds` with the value that is missing beyond either end, for the policy ``overflow``."""
        return self.values, self.thresholds

    @property
    @abstractmethod
    def value_codes(self) -> np.ndarray:
        """The code of each of `values`: integers, shape (n,)."""

    @cached_property
    def code_values(self) -> np.ndarray:
        """The value of every code, -0, Inf and NaN included: float64, shape (2^bits,), read-only."""
        table, sign = np.full(1 << self.bits, np.nan), 1 << self.bits - 1
        table[self.value_codes] = self.values
        if self.has_negative_zero:
            table[sign] = -0.0
        if self.inf_code is not None:
            table[[self.inf_code, self.inf_code | sign]] = np.inf, -np.inf
        return read_only(table)

    @abstractmethod
    def fits(self, precision: int, lowest: int, highest: int, *, scales: Format | None = None) -> bool:
        """Whether floats with these limits hold every value; with ``scales``, every product of a value and a scale.

        Args:
            precision: significant bits, the implicit one included.
            lowest: exponent of the smallest positive (subnormal) number.
            highest: exponent of the largest binade.
            scales: format of the scales, which are at most its `scale_target`; None: check the values alone.
        """

    @property
    @abstractmethod
    def rounds_in_float32(self) -> bool:
        """Whether `altgrad.numerics.round_to_grid`, which computes in float32, is exact for the format."""

    @staticmethod
    def of_values(
        name: str, values: Sequence[float], *,
        symmetric: bool = False, ties: str = "even", scale_to: float | str = "max",
    ) -> Format:  # fmt: skip
        """Return the format with a list of values, of which a number is rounded to the nearest.

        A code is the place of a value in the list. With ``symmetric`` it has a sign bit before the place, and no code
        means -0.

        Args:
            name: name in reports and messages.
            values: ascending numbers that float32 holds, at most 2^16 with their negatives, one of them positive.
            symmetric: whether the format also has the negative of each value; then ``values`` begin at 0 or above.
            ties: where the middle of two values is rounded to: the ``even`` code, ``away`` from zero, or ``up``.
            scale_to: what a scale brings a tensor to: see `scale_target_of`.

        Raises:
            ValueError: the message begins with the argument.
        """
        from altgrad.formats.tables import table_of_values

        return table_of_values(name, values, symmetric, ties, scale_to)

    # -- range and spacing --------------------------------------------------------------------------------------------

    @property
    def signed(self) -> bool:
        """Whether there are negative values."""
        return bool(self.values[0] < 0)

    @property
    def has_inf(self) -> bool:
        return self.inf_code is not None

    @property
    def has_zero(self) -> bool:
        return 0.0 in self.values

    @cached_property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.values[-1])

    @property
    def smallest(self) -> float:
        """Smallest positive value."""
        return float(self.values[np.searchsorted(self.values, 0.0, side="right")])

    @property
    def has_bytes(self) -> bool:
        """Whether `altgrad.numerics.encode_operand` has a code of one byte for each value and for NaN."""
        return self.bits <= 8

    @property
    def binades(self) -> float:
        """Dynamic range: log2 of the largest over the smallest positive value."""
        return math.log2(self.max / self.smallest)

    @property
    def min_normal(self) -> float | None:
        """Smallest normal value, None where every value is subnormal; a table's smallest positive value."""
        return self.smallest

    @property
    def emin(self) -> int:
        """Exponent of the lowest binade."""
        return math.frexp(self.smallest)[1] - 1

    @property
    def emax(self) -> int:
        """``floor(log2(max))``."""
        return math.frexp(self.max)[1] - 1

    @property
    def scale_target(self) -> float:
        """What scaling brings a tensor's `scale_statistic` to; by default the largest magnitude of both signs."""
        nearer_end = min(self.max, -float(self.values[0])) if self.signed else self.max
        return scale_target_of(self.scale_to, min(nearer_end, TARGET_CAP))[0]

    @property
    def scale_statistic(self) -> str:
        """Which statistic of a tensor its scale brings to `scale_target`: ``amax`` or ``rms``."""
        return scale_target_of(self.scale_to, 1.0)[1]

    @property
    def top(self) -> float:
        """The magnitude at which scaled tensors saturate: by default what scaling brings the largest to."""
        return self.scale_target if self.scale_to == "max" else self.max

    def scaled_to(self, scale_to: float | str) -> Self:
        """Return the format with another `scale_to`."""
        scale_target_of(scale_to, 1.0)  # raises where it is wrong
        return replace(self, scale_to=scale_to)  # type: ignore[type-var] # both kinds are dataclasses

    def spacing(self, x: float | np.ndarray) -> np.ndarray:
        """Return the distance between the two values around each x; on a value, the one away from zero.

        Beyond the largest and the lowest value it is the last distance there. float64, the shape of ``x``.
        """
        x = np.asarray(x, np.float64)
        above = np.where(x < 0, np.searchsorted(self.values, x, "left"), np.searchsorted(self.values, x, "right"))
        steps: np.ndarray = np.diff(self.values)[np.clip(above - 1, 0, len(self.values) - 2)]
        return steps


def scale_target_of(scale_to: float | str, largest: float) -> tuple[float, str]:
    """Return (target, statistic of the tensor) for a setting ``scale_to``.

    ``max`` brings a tensor's largest magnitude, its amax, to ``largest``; a number, such as 1, brings it to that
    number; ``1 of rms`` brings the root of the tensor's mean square there.

    Raises:
        ValueError: ``scale_to`` is none of these.
    """
    number, _, statistic = str(scale_to).partition(" of ")
    try:
        target = 1.0 if number == "max" else float(number)
    except ValueError:
        target = math.nan
    if not 2.0**-64 <= target <= 2.0**64 or statistic not in ("", *STATISTICS) or (number, statistic) == ("max", "rms"):
        raise ValueError(
            f"scale_to: expected max, a number from 2^-64 to 2^64, or one such as '1 of rms', got {scale_to!r}"
        )
    return largest if number == "max" else target, statistic or "amax"


def read_only(numbers: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return a float64 array that cannot be written to."""
    array = np.array(numbers, np.float64)
    array.flags.writeable = False
    return array


def in_float32(values: np.ndarray, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `Format.values` and `Format.thresholds` as float32, without values to which no float32 is rounded.

    All formats but TAKUM8 keep every value.
    """
    with np.errstate(over="ignore"):
        narrow = thresholds.astype(np.float32)
    narrow = np.where(narrow < thresholds, np.nextafter(narrow, np.float32(np.inf)), narrow)
    first = np.insert(narrow, 0, -np.finfo(np.float32).max)  # number of each value
    kept = first < np.append(narrow, np.float32(np.inf))
    return values[kept].astype(np.float32), first[kept][1:]


def to_nearest(values: np.ndarray, codes: np.ndarray, ties: str = "even") -> np.ndarray:
    """Return the `Format.thresholds` that round to the nearest of ``values``.

    ``ties`` says where the middle of two values is rounded to: to the one whose code in ``codes`` is ``even``, ``away``
    from zero, or ``up``.
    """
    below, above = values[:-1], values[1:]
    up = {"even": codes[1:] % 2 == 0, "away": below + above >= 0, "up": above == above}[ties]
    total = below + above
    part = total - below
    error = (below - (total - part)) + (above - part)  # of the sum, exactly (Knuth's TwoSum)
    return read_only(np.where((error > 0) | ((error == 0) & ~up), np.nextafter(total / 2, np.inf), total / 2))
