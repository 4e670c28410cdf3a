"""The definition of rounding again, one number at a time, in exact fractions.

Slow on purpose and meant to be believed by reading: all values of a format are listed from the definition of a code's
value, and a number is rounded by looking at the two values that it lies between. Tests compare the vectorised functions
with these. The two share nothing but `FloatFormat`'s fields and flags.
"""

import math
from bisect import bisect_left, bisect_right
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


@lru_cache(maxsize=8)
def _line(fmt: Format) -> tuple[Fraction, ...]:
    """Return all values, ascending, between the two that are missing beyond them: an end itself where none is."""
    if isinstance(fmt, TableFormat):
        low, high = fmt.missing or (fmt.table[0], fmt.table[-1])
        return tuple(map(Fraction, (low, *fmt.table, high)))
    assert isinstance(fmt, FloatFormat)
    magnitudes = grid(fmt)
    return (*([-x for x in magnitudes[:0:-1]] if fmt.signed else magnitudes[:1]), *magnitudes)


def round_scalar(
    x: float | Fraction, fmt: Format, rounding: str = "nearest-even", overflow: str = "saturate", random: int = 0,
    random_bits: int = 0,
) -> float:  # fmt: skip
    """Return ``x`` rounded to ``fmt``; see `altgrad.numerics.quantize` for the modes and policies.

    A table's own rule, which its limits define, is called nearest-even.
    """
    if math.isnan(x) or (x < 0 and not fmt.signed):
        return math.nan
    values, infinite = _line(fmt), math.isinf(x)
    exact = values[0 if x < 0 else -1] if infinite else min(max(Fraction(x), values[0]), values[-1])
    place = bisect_left(values, exact) if x < 0 else bisect_right(values, exact)
    place = min(max(place, 1), len(values) - 1)
    below, above = values[place - 1], values[place]
    nearer, farther = (above, below) if x < 0 else (below, above)  # to zero
    inwards = rounding in ("toward-zero", "up" if x < 0 else "down")
    if exact in (below, above):
        result = exact
    elif rounding == "nearest-even" and isinstance(fmt, TableFormat):
        first, last = math.nextafter((values[0] + values[1]) / 2, math.inf), float((values[-2] + values[-1]) / 2)
        result = values[bisect_right((first, *fmt.limits, last), exact)]
    elif rounding in ("toward-zero", "up", "down"):
        result = nearer if inwards else farther
    else:
        rest, half = (exact - nearer) / (farther - nearer), Fraction(1, 2)
        if rounding == "stochastic":
            away = rest + Fraction(2 * random + 1, 2 ** (random_bits + 1)) >= 1
        else:
            away = rest > half or (rest == half and (rounding == "nearest-away" or _is_odd(nearer, fmt)))
        result = farther if away else nearer

    lowest, largest = values[1], values[-2]
    if overflow == "overflow" and (infinite or not (lowest <= result <= largest or inwards)):
        return math.copysign(math.inf, x) if fmt.has_inf else math.nan
    if result == 0:
        return -0.0 if fmt.has_negative_zero and math.copysign(1.0, x) < 0 else 0.0
    return float(min(max(result, lowest), largest))


def _is_odd(value: Fraction, fmt: Format) -> bool:
    """Whether the code of a float format's value is odd."""
    assert isinstance(fmt, FloatFormat)
    return bisect_left(grid(fmt), abs(value)) % 2 == 1
