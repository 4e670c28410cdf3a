"""Formats given by a table: number systems with a name, and a user's own.

====================  ===============================================  ===========================================
name                  values                                           rounding
====================  ===============================================  ===========================================
HIF8                  HiFloat8 (Luo et al. 2024, arXiv:2409.16626)     nearest, ties away from zero
POSIT8, POSIT8_0      posits of 8 bits with 2 (Posit Standard 2022)    nearest by the code string, ties to the even
                      and 0 exponent bits (the draft of 2018)          code; never to zero
TAKUM8                linear takum of 8 bits (Hunhold 2024,            as posits
                      arXiv:2404.18603)
LNS8                  a sign, and log2 of the magnitude in steps of    nearest, ties to the larger value
                      1/8 from -63/8 to 63/8; zero
NF4                   the 16 values of QLoRA (Dettmers et al. 2023,    nearest, ties to the larger value
                      arXiv:2305.14314, appendix E)
dynamic8,             dynamic maps of 8 bits (Dettmers et al. 2021,    nearest in float32 arithmetic, ties to the
unsigned_dynamic8     arXiv:2110.02861, section 2.1) as in             larger value, as in torchao
                      bitsandbytes and torchao
dynamic4,             torchao's maps of 4 bits (Li et al. 2023,        as dynamic8
unsigned_linear4      arXiv:2309.01507)
====================  ===============================================  ===========================================

Nearest by the code string: the threshold between two codes of n bits is the value of the code of n + 1 bits between
them. Where exponent bits are cut off this is the geometric mean. The largest value is never exceeded. HIF8 has an
infinity, from 40960 on; rounding reaches it only under the overflow policy of that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from altgrad.formats.format import MAX_BITS, Format, read_only, scale_target_of, to_nearest

NAR = 0x80  # "not a real", the NaN of posits and takums; of HiFloat8 too
# Tapered formats are most precise around 1. Posits are trained with tensors scaled so that their centre lies there (Lu
# et al. 2020, arXiv:1909.03831); HiFloat8's paper does not scale single tensors, whose elements then lie around 1.
CENTRED = "1 of rms"
TIES = {"even": "to the even code", "away": "away from zero", "up": "to the larger value"}


@dataclass(frozen=True)
class TableFormat(Format):
    """A format whose values and thresholds are a table.

    Args:
        name: name in reports and messages.
        table: the finite values, ascending; float32 holds those that a float32 can be rounded to.
        limits: the smallest float64 that is rounded to each value but the lowest.
        codes: the code of each value.
        bits: width of a code.
        rule: how numbers are rounded, in words.
        inf_code: code of +Inf; that of -Inf has the sign bit too. Or None.
        nan_code: code of NaN, or None.
        missing: distance from the largest value, and from the lowest, to the next one that is missing. Numbers nearer
            to it are out of range, for the overflow policy ``overflow``. None: all but infinities are in range.
        scale_to: what a scale brings a tensor to, if a recipe does not say: see `scale_target_of`.
    """

    name: str
    table: tuple[float, ...]
    limits: tuple[float, ...]
    codes: tuple[int, ...]
    bits: int
    rule: str
    inf_code: int | None = None
    nan_code: int | None = None
    missing: float | None = None
    scale_to: float | str = "max"
    has_negative_zero = False

    def __str__(self) -> str:
        return f"{self.name} ({self.bits} bits, {len(self.table)} values, max {self.max:g}, {self.rule})"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # of up to 2^16 numbers, and formats are keys of caches
        return hash((self.name, self.table, self.limits, self.scale_to))

    @cached_property
    def values(self) -> np.ndarray:
        return read_only(self.table)

    @cached_property
    def thresholds(self) -> np.ndarray:
        return read_only(self.limits)

    @property
    def extended(self) -> tuple[np.ndarray, np.ndarray]:
        if self.missing is None:
            return self.values, self.thresholds
        low, high = self.table[0], self.table[-1]
        values = read_only([low - self.missing, *self.table, high + self.missing])
        down = math.nextafter(low - self.missing / 2, math.inf)
        return values, read_only([down, *self.limits, high + self.missing / 2])

    @cached_property
    def value_codes(self) -> np.ndarray:
        return np.array(self.codes)

    @cached_property
    def code_values(self) -> np.ndarray:
        table = np.full(1 << self.bits, np.nan)
        table[list(self.codes)] = self.table
        if self.inf_code is not None:
            table[[self.inf_code, self.inf_code | 1 << self.bits - 1]] = np.inf, -np.inf
        return read_only(table)

    def fits(self, precision: int, lowest: int, highest: int, *, scales: Format | None = None) -> bool:
        end, least = 2 * math.ldexp(1.0, highest), math.ldexp(1.0, lowest)
        above, below = np.append(self.thresholds, np.inf), np.insert(self.thresholds, 0, -np.inf)
        # Of the values nearest to zero and infinity, those to which some float with these limits is rounded.
        reached = np.where(self.values > 0, (above > least) & (below < end), (below <= -least) & (above > -end))
        values = self.values[reached & (self.values != 0)]
        if scales is not None:
            values = np.outer(values, scales.values[np.abs(scales.values) <= scales.scale_target]).ravel()
        significands, exponents = np.frexp(np.abs(values))
        steps = np.maximum(exponents - precision, lowest)  # exponents of the floats' spacing there
        whole = np.ldexp(significands, exponents - steps)
        return bool((whole == np.floor(whole)).all() and (exponents - 1 <= highest).all())

    @property
    def has_bytes(self) -> bool:
        return len(self.table) < 256

    @property
    def rounds_in_float32(self) -> bool:
        return self.signed and self.fits(24, -149, 127)


# --- codes of tapered formats ----------------------------------------------------------------------------------------


def posit(code: int, bits: int, exponent_bits: int) -> Fraction:
    """Return the value of a positive code of a posit (Posit Standard 2022, section 3.4), 0 < code < 2^(bits - 1)."""
    text = f"{code:0{bits - 1}b}"
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    exponent, fraction = (text[run + 1 :] + "0" * exponent_bits)[:exponent_bits], text[run + 1 + exponent_bits :]
    return _binary("1" + fraction, regime * 2**exponent_bits + int(exponent or "0", 2))


def takum(code: int, bits: int) -> Fraction:
    """Return the value of a positive code of a linear takum (arXiv:2404.18603, definition 2); bits beyond are zero."""
    text = f"{code:0{bits - 1}b}".ljust(11, "0")
    direction, prefix = text[0] == "1", int(text[1:4], 2)
    length = prefix if direction else 7 - prefix
    tail = text[4:].ljust(length, "0")
    characteristic = int(tail[:length] or "0", 2) + (2**length - 1 if direction else 1 - 2 ** (length + 1))
    return _binary("1" + tail[length:], characteristic)


def _binary(digits: str, exponent: int) -> Fraction:
    """Return the number with these binary digits, the point behind the first, times 2^exponent."""
    places = exponent - len(digits) + 1
    return int(digits, 2) * (Fraction(2**places) if places >= 0 else Fraction(1, 2**-places))


def _tapered(name: str, value: Callable[[int, int], Fraction]) -> TableFormat:
    """Return the format of 8 bits with codes in two's complement; ``value(code, bits)`` is that of a positive code."""
    codes = np.arange(-127, 128)
    magnitudes = [0.0, *(float(value(code, 8)) for code in range(1, 128))]
    values = [math.copysign(magnitudes[abs(code)], code) + 0.0 for code in codes]
    # A code of 9 bits lies between two of 8 bits, and is rounded to the even one. All numbers but 0 leave zero.
    limits = {0: 0.0, 1: math.ulp(0.0)}
    for code in range(1, 127):
        between = float(value(2 * code + 1, 9))
        limits[code + 1] = between if code % 2 else math.nextafter(between, math.inf)
        limits[-code] = math.nextafter(-between, math.inf) if code % 2 else -between
    rule = "nearest by the code string, ties to the even code, never to zero"
    ascending = [limits[code] for code in codes[1:]]
    return _table(name, values, ascending, codes & 0xFF, 8, rule, nan_code=NAR, scale_to=CENTRED)


def _hifloat8() -> TableFormat:
    magnitudes = [math.ldexp(1, code - 23) for code in range(1, 8)]
    coded = list(range(1, 8))
    # (prefix of the code, exponents, bits of mantissa); an exponent has its sign, then its bits below the leading one.
    for prefix, lengths in ((0b0001, 0), (0b001, 1), (0b01, 2), (0b10, 3), (0b11, 4)):
        width = 7 - lengths - {0: 4, 1: 3}.get(lengths, 2)
        for exponent in _exponents(lengths):
            field = (exponent < 0) << max(lengths - 1, 0) | (abs(exponent) - (1 << lengths >> 1))
            for mantissa in range(1 << width):
                coded.append((prefix << lengths | field) << width | mantissa)
                magnitudes.append(math.ldexp(1 + mantissa / (1 << width), exponent))
    order = np.argsort(magnitudes)[:-1]  # the largest of them is infinity
    values, codes = _mirrored(np.array(magnitudes)[order], np.array(coded)[order], 8)
    return _table(
        "HIF8", values, to_nearest(values, codes, "away"), codes, 8, "nearest, ties away from zero",
        inf_code=0x6F, nan_code=NAR, missing=16384.0, scale_to=CENTRED,
    )  # fmt: skip


def _exponents(length: int) -> list[int]:
    """Return the exponents whose magnitude has ``length`` bits."""
    return [sign * e for sign in (-1, 1) for e in range(1 << length >> 1, 1 << length)] if length else [0]


def _mirrored(positive: np.ndarray, codes: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values and codes, ascending, of positive values, their negatives, whose codes have a sign bit, and 0."""
    values = np.concatenate([-positive[::-1], [0.0], positive])
    return values, np.concatenate([codes[::-1] | 1 << bits - 1, [0], codes])


# --- tables of values ------------------------------------------------------------------------------------------------


def table_of_values(
    name: str, values: Sequence[float], *, symmetric: bool = False, ties: str = "even", scale_to: float | str = "max"
) -> TableFormat:
    """Return `Format.of_values`, which says what the arguments are."""
    if ties not in TIES:
        raise ValueError(f"ties: expected one of {', '.join(TIES)}, got {ties!r}")
    scale_target_of(scale_to, 1.0)  # raises where it is wrong
    table = _checked(values, symmetric)
    bits = max(1, (len(table) - 1).bit_length()) + symmetric
    if bits > MAX_BITS:
        raise ValueError(f"values: {len(table):,} take {bits} bits, at most {MAX_BITS} are supported")
    codes = np.arange(len(table))
    if symmetric:
        negative = slice(None, 0 if table[0] == 0 else None, -1)
        table = np.concatenate([-table[negative], table])
        codes = np.concatenate([codes[negative] | 1 << bits - 1, codes])
    return _table(
        name, table, to_nearest(table, codes, ties), codes, bits, f"nearest, ties {TIES[ties]}",
        scale_to=scale_to, missing=float(table[-1] - table[-2]),
    )  # fmt: skip


def _checked(values: Sequence[float], symmetric: bool) -> np.ndarray:
    """Return ``values`` as float32 numbers in float64."""
    if isinstance(values, str) or not all(isinstance(x, (int, float, np.number)) for x in values):
        raise ValueError(f"values: expected numbers, got {values!r}"[:200])
    given = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        table = given.astype(np.float32).astype(np.float64)
    if len(given) < 2:
        raise ValueError(f"values: expected at least two numbers, got {len(given)}")
    if not np.isfinite(table).all():
        raise ValueError(f"values: {given[~np.isfinite(table)][0]:g} is no finite float32")
    for i in np.flatnonzero(np.diff(table) <= 0)[:1]:
        same = given[i] < given[i + 1]
        why = "are the same float32" if same else "are not in ascending order, each once"
        raise ValueError(f"values: {given[i]:.9g} and {given[i + 1]:.9g}, number {i + 1} and {i + 2}, {why}")
    if table[-1] <= 0:
        raise ValueError(f"values: expected a positive number, and the largest is {table[-1]:g}")
    if symmetric and table[0] < 0:
        raise ValueError(f"symmetric: {table[0]:g} is negative; write the values from zero up, or symmetric: false")
    return table


def _table(
    name: str, values: Iterable[float], limits: Iterable[float], codes: Iterable[int], bits: int, rule: str, **more: Any
) -> TableFormat:
    numbers = (tuple(map(float, values)), tuple(map(float, limits)), tuple(map(int, codes)))
    return TableFormat(name, *numbers, bits, rule, **more)


def _logarithmic() -> TableFormat:
    """Return LNS8. A code is a sign bit and log2 of the magnitude as 4.3 fixed point in two's complement."""
    places = np.arange(-63, 64)
    positive = np.exp2(places / 8).astype(np.float32).astype(np.float64)
    values, codes = _mirrored(positive, places & 0x7F, 8)
    codes = np.where(values == 0, -64 & 0x7F, codes)
    return _table("LNS8", values, to_nearest(values, codes, "up"), codes, 8, "nearest, ties to the larger value")


def _normal_float() -> TableFormat:
    values = np.array(_NF4, np.float32).astype(np.float64)
    codes = np.arange(16)
    return _table("NF4", values, to_nearest(values, codes, "up"), codes, 4, "nearest, ties to the larger value")


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


# --- maps of optimizer states ----------------------------------------------------------------------------------------


def _map(name: str, numbers: Iterable[float]) -> TableFormat:
    values = np.array(sorted(numbers), np.float32)
    limits = [float(_first_up(*pair)) for pair in pairwise(values)]
    rule = "nearest in float32, ties to the larger value"
    return _table(name, values, limits, range(len(values)), int(np.log2(len(values))), rule)


def _first_up(below: np.float32, above: np.float32) -> np.float32:
    """Return the smallest float32 at least as near to ``above`` as to ``below``, with float32 differences."""

    def goes_up(x: np.float32) -> bool:
        return bool(x - below >= (above - below) * np.float32(0.5))

    x = np.float32((np.float64(below) + np.float64(above)) / 2)
    while goes_up(x):
        x = np.nextafter(x, np.float32(-np.inf))
    while not goes_up(x):
        x = np.nextafter(x, np.float32(np.inf))
    return x


def _dynamic(signed: bool, exponents: int, bits: int) -> list[float]:
    """Return the values of a dynamic map, unsorted: ``exponents`` decades, each with twice the steps of the last."""
    lowest, values = bits - 1 - exponents, [0.0, 1.0]
    steps = [1 << (i + lowest + (0 if signed else 1)) for i in range(exponents)]
    decades = [(10 ** (i + 1 - exponents), count) for i, count in enumerate(steps)]
    if lowest:  # the remaining codes go to the top decade
        decades.append((1, (1 << lowest) - 1))
    for decade, count in decades:
        means = (np.float32(decade) * _means(count)).tolist()
        values += means + ([-mean for mean in means] if signed else [])
    return values


def _means(count: int) -> np.ndarray:
    """Return the midpoints of ``count`` equal steps from 0.1 to 1, float32; step edges are torch.linspace's."""
    low, high, places = np.float32(0.1), np.float32(1), np.arange(count + 1)
    step = np.float64((high - low) / np.float32(count))  # so that a product and a sum are rounded once, as by an FMA
    edges = np.where(places < (count + 1) // 2, low + step * places, high - step * (count - places)).astype(np.float32)
    return (edges[:-1] + edges[1:]) / np.float32(2)


_MAKERS: dict[str, Callable[[], TableFormat]] = {
    "HIF8": _hifloat8,
    "POSIT8": lambda: _tapered("POSIT8", partial(posit, exponent_bits=2)),
    "POSIT8_0": lambda: _tapered("POSIT8_0", partial(posit, exponent_bits=0)),
    "TAKUM8": lambda: _tapered("TAKUM8", takum),
    "LNS8": _logarithmic,
    "NF4": _normal_float,
    "dynamic8": lambda: _map("dynamic8", _dynamic(True, 7, 8)),
    "unsigned_dynamic8": lambda: _map("unsigned_dynamic8", _dynamic(False, 7, 8)),
    "dynamic4": lambda: _map("dynamic4", _dynamic(True, 3, 4)),
    "unsigned_linear4": lambda: _map("unsigned_linear4", [i / 16 for i in range(1, 17)]),
}
TABLES = tuple(_MAKERS)


@cache
def named_table(name: str) -> TableFormat:
    """Return the format called ``name``, one of `TABLES`."""
    return _MAKERS[name]()
