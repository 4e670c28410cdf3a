"""The definition of rounding again, one number at a time, in exact fractions.

Slow on purpose and meant to be believed by reading: all values of a format are listed from the definition of a code's
value, and a number is rounded by looking at the two values that it lies between. Tests compare the vectorised functions
with these. The two share nothing but `FloatFormat`'s fields and flags.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from fractions import Fraction
from functools import lru_cache

from altgrad.formats import FloatFormat, Format
from altgrad.formats.tables import TableFormat


def magnitude_of_code(code: int, fmt: FloatFormat) -> Fraction:
    """Return the value of a magnitude code, as if every code were a number.

    Field 0 holds ``m / 2^M * 2^(1 - bias)``, a field e >= 1 ``(1 + m / 2^M) * 2^(e - bias)``. A format without sign and
    mantissa has the second form throughout.
    """
    field, mantissa = divmod(code, 2**fmt.mantissa_bits)
    fraction = Fraction(mantissa, 2**fmt.mantissa_bits)
    if field == 0 and (fmt.signed or fmt.mantissa_bits):
        return fraction * Fraction(2) ** (1 - fmt.bias)
    return (1 + fraction) * Fraction(2) ** (field - fmt.bias)


def largest_code(fmt: FloatFormat) -> int:
    """Return the magnitude code of the largest finite value."""
    all_ones = 2 ** (fmt.exponent_bits + fmt.mantissa_bits) - 1
    if fmt.specials in ("fn", "p3109"):  # the all-ones magnitude is NaN or Inf
        return all_ones - 1
    if fmt.specials == "ieee":  # the whole top exponent is Inf and NaN
        return all_ones - 2**fmt.mantissa_bits
    return all_ones


@lru_cache(maxsize=8)
def grid(fmt: FloatFormat) -> tuple[Fraction, ...]:
    """Return all finite magnitudes in code order, then the value that the next code would have."""
    return tuple(magnitude_of_code(code, fmt) for code in range(largest_code(fmt) + 2))


def round_scalar(
    x: float | Fraction,
    fmt: Format,
    rounding: str = "nearest-even",
    overflow: str = "saturate",
    random: int = 0,
    random_bits: int = 0,
) -> float:
    """Return ``x`` rounded to ``fmt``; see `altgrad.numerics.quantize` for the modes and policies."""
    if isinstance(x, float) and math.isnan(x):
        return math.nan
    if isinstance(fmt, TableFormat):
        return _round_by_table(x, fmt, rounding, overflow)
    assert isinstance(fmt, FloatFormat)
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    if not fmt.signed and x < 0:
        return math.nan

    beyond = float(grid(fmt)[-2])
    if overflow == "overflow":
        beyond = math.inf if fmt.has_inf else math.nan

    if isinstance(x, float) and math.isinf(x):
        result = beyond
    else:
        code = _rounded_code(abs(Fraction(x)), negative, fmt, rounding, random, random_bits)
        result = beyond if code > largest_code(fmt) else float(grid(fmt)[code])

    if result == 0 and not fmt.has_negative_zero:
        return 0.0
    return -result if negative and fmt.signed else result


def _rounded_code(
    magnitude: Fraction, negative: bool, fmt: FloatFormat, rounding: str, random: int, random_bits: int
) -> int:
    """Return the magnitude code of the result; one past `largest_code` stands for overflow."""
    values = grid(fmt)
    magnitude = max(magnitude, values[0])  # not zero in an unsigned format
    towards_zero = rounding == "toward-zero" or rounding == ("up" if negative else "down")
    if magnitude >= values[-1]:
        return len(values) - 2 if towards_zero else len(values) - 1
    lower = bisect_right(values, magnitude) - 1
    rest = (magnitude - values[lower]) / (values[lower + 1] - values[lower])
    if rest == 0 or towards_zero:
        return lower
    if rounding in ("up", "down"):
        return lower + 1
    if rounding == "stochastic":
        return lower + (rest + Fraction(2 * random + 1, 2 ** (random_bits + 1)) >= 1)
    if rest == Fraction(1, 2):
        return lower + 1 if rounding == "nearest-away" else lower + lower % 2
    return lower + (rest > Fraction(1, 2))


def _round_by_table(x: float | Fraction, fmt: TableFormat, rounding: str, overflow: str) -> float:
    """Return `round_scalar` for a table, whose thresholds define its own rule, called nearest-even."""
    lowest, largest = Fraction(fmt.table[0]), Fraction(fmt.table[-1])
    beyond = math.copysign(math.inf, x) if fmt.has_inf else math.nan
    if isinstance(x, float) and math.isinf(x):
        return beyond if overflow == "overflow" else float(largest if x > 0 else lowest)
    exact = Fraction(x)
    values, limits = list(map(Fraction, fmt.table)), list(fmt.limits)
    if fmt.missing is not None:
        values = [Fraction(fmt.missing[0]), *values, Fraction(fmt.missing[1])]
        limits = [math.nextafter((values[0] + lowest) / 2, math.inf), *limits, float((largest + values[-1]) / 2)]
    exact = min(max(exact, values[0]), values[-1])
    place = max(bisect_right(values, exact) - 1, 0)
    below = values[place]
    above = values[min(place + 1, len(values) - 1)]
    if rounding == "nearest-even":
        result = values[bisect_right(limits, x)]
    elif exact == below:
        result = below
    elif rounding == "nearest-away":
        up = exact >= (below + above) / 2 if exact > 0 else exact > (below + above) / 2
        result = above if up else below
    else:
        up = {"up": True, "down": False, "toward-zero": exact < 0}[rounding]
        result = above if up else below
    leaves = not lowest <= result <= largest
    result = min(max(result, lowest), largest)
    inwards = rounding in ("toward-zero", "up" if x < 0 else "down")
    return beyond if leaves and overflow == "overflow" and not inwards else float(result)
