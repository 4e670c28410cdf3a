"""Formats given by a table: number systems with a name, and a user's own.

- HIF8: HiFloat8 (Luo et al. 2024, arXiv:2409.16626). To nearest, ties away from zero. It has an infinity, from 40960
  on; rounding reaches it only under the overflow policy of that name.
- POSIT8, POSIT8_0: posits of 8 bits with 2 exponent bits (Posit Standard 2022) and with none (the draft of 2018). To
  nearest by the code string, ties to the even code; never to zero, and never beyond the largest value.
- TAKUM8: linear takum of 8 bits (Hunhold 2024, arXiv:2404.18603), rounded as posits.
- LNS8: a sign, and log2 of the magnitude in steps of 1/8 from -63/8 to 63/8; zero. To nearest, ties to the larger.
- NF4: the 16 values of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E). To nearest, ties to the larger.
- dynamic8, unsigned_dynamic8: dynamic maps of 8 bits (Dettmers et al. 2021, arXiv:2110.02861, section 2.1) as in
  bitsandbytes and torchao. To nearest in float32 arithmetic, ties to the larger value, as in torchao.
- dynamic4, unsigned_linear4: torchao's maps of 4 bits (Li et al. 2023, arXiv:2309.01507), rounded as dynamic8.

Nearest by the code string: the threshold between two codes of n bits is the value of the code of n + 1 bits between
them. Where exponent bits are cut off this is the geometric mean.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
        missing: the next values below the lowest and above the largest, which the table lacks. Numbers nearer to them
            are out of range, for the overflow policy ``overflow``. None: all but infinities are in range.
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
    missing: tuple[float, float] | None = None
    scale_to: float | str = "max"
    has_negative_zero = False

    def __str__(self) -> str:
        return f"{self.name} ({self.bits} bits, {len(self.table)} values, max {self.max:g}, {self.rule})"

    def __hash__(self) -> int:  # not of all numbers, up to 2^16: formats are keys of caches
        return hash((self.name, len(self.table), self.table[-1], self.scale_to))

    @cached_property
    def values(self) -> np.ndarray:
        return read_only(self.table)

    @cached_property
    def thresholds(self) -> np.ndarray:
        return read_only(self.limits)

    @cached_property
    def extended(self) -> tuple[np.ndarray, np.ndarray]:
        if self.missing is None:
            return self.values, self.thresholds
        low, high = self.missing
        first, last = math.nextafter((low + self.table[0]) / 2, math.inf), (self.table[-1] + high) / 2
        return read_only([low, *self.table, high]), read_only([first, *self.limits, last])

    @cached_property
    def value_codes(self) -> np.ndarray:
        return np.array(self.codes)

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


# --- systems that are defined by the bits of a code ------------------------------------------------------------------


def _binary(fraction: str, exponent: int) -> float:
    """Return 1 + the fraction with these binary digits, times 2^exponent."""
    return math.ldexp(int("1" + fraction, 2), exponent - len(fraction))


def _posit(code: int, bits: int, exponent_bits: int) -> float:
    """Return the value of a positive code of a posit (Posit Standard 2022, section 3.4)."""
    text = f"{code:0{bits - 1}b}"
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    tail = text[run + 1 :].ljust(exponent_bits, "0")
    return _binary(tail[exponent_bits:], regime * 2**exponent_bits + int("0" + tail[:exponent_bits], 2))


def _takum(code: int, bits: int) -> float:
    """Return the value of a positive code of a linear takum (arXiv:2404.18603, definition 2); bits beyond are zero."""
    text = f"{code:0{bits - 1}b}".ljust(11, "0")
    up, regime = text[0] == "1", int(text[1:4], 2)
    length = regime if up else 7 - regime
    characteristic = int("0" + text[4 : 4 + length], 2) + (2**length - 1 if up else 1 - 2 ** (length + 1))
    return _binary(text[4 + length :], characteristic)


def _tapered(name: str, value: Callable[[int, int], float]) -> TableFormat:
    """Return the format of 8 bits with codes in two's complement; ``value(code, bits)`` is that of a positive code."""

    def signed(code: int, bits: int) -> float:
        return math.copysign(value(abs(code), bits), code) if code else 0.0

    codes = range(-127, 128)
    limits = []
    for code in codes[:-1]:
        between = signed(2 * code + 1, 9)  # to the even one of the two codes of 8 bits around it
        limits.append(between if code % 2 else math.nextafter(between, math.inf))
    limits[126:128] = 0.0, math.ulp(0.0)  # all numbers but 0 leave zero
    numbers = tuple(signed(code, 8) for code in codes), tuple(limits), tuple(code & 0xFF for code in codes)
    rule = "nearest by the code string, ties to the even code, never to zero"
    return TableFormat(name, *numbers, 8, rule, nan_code=NAR, scale_to=CENTRED)


def _hifloat8(code: int) -> float:
    """Return the value of a code below 0x80 of HiFloat8 (arXiv:2409.16626, section 3)."""
    text = f"{code:07b}"
    for length, prefix in enumerate(("0001", "001", "01", "10", "11")):  # digits of the exponent, its sign first
        if text.startswith(prefix):
            digits = text[len(prefix) :]
            size = int("1" + digits[1:length], 2) if length else 0
            return _binary(digits[length:], -size if digits[:length].startswith("1") else size)
    return math.ldexp(1, code - 23) if code else 0.0  # below 2^-15: powers of two


# --- tables of values ------------------------------------------------------------------------------------------------


def table_of_values(name: str, values: Sequence[float], symmetric: bool, ties: str, scale_to: float | str) -> Format:
    """Return `Format.of_values`, which says what the arguments are."""
    if ties not in TIES:
        raise ValueError(f"ties: expected one of {', '.join(TIES)}, got {ties!r}")
    scale_target_of(scale_to, 1.0)  # raises where it is wrong
    if isinstance(values, str) or not all(isinstance(x, (int, float, np.number)) for x in values):
        raise ValueError(f"values: expected numbers, got {values!r}"[:200])
    if len(values) < 2:
        raise ValueError(f"values: expected at least two numbers, got {len(values)}")
    given = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        table = given.astype(np.float32).astype(np.float64)
    if not np.isfinite(table).all():
        raise ValueError(f"values: {given[~np.isfinite(table)][0]:g} is no finite float32")
    for i in np.flatnonzero(np.diff(table) <= 0)[:1]:
        why = "are the same float32" if given[i] < given[i + 1] else "are not in ascending order, each once"
        raise ValueError(f"values: {given[i]:.9g} and {given[i + 1]:.9g}, number {i + 1} and {i + 2}, {why}")
    if table[-1] <= 0:
        raise ValueError(f"values: expected a positive number, and the largest is {table[-1]:g}")
    if symmetric and table[0] < 0:
        raise ValueError(f"symmetric: {table[0]:g} is negative; write the values from zero up, or symmetric: false")
    high = float(2 * table[-1] - table[-2])
    missing = -high if symmetric else float(2 * table[0] - table[1]), high
    return _nearest(name, table.tolist(), range(len(table)), ties, symmetric, scale_to=scale_to, missing=missing)


def _nearest(
    name: str, values: Sequence[float], codes: Sequence[int], ties: str, symmetric: bool = True, **more: Any
) -> TableFormat:
    """Return the format that rounds to the nearest of ``values``; if symmetric, their negatives too, by a sign bit."""
    table, places = np.array(values, np.float32).astype(np.float64), np.array(codes)
    bits = max(1, (len(table) - 1).bit_length()) + symmetric
    if bits > MAX_BITS:
        raise ValueError(f"values: {len(table):,} take {bits} bits, at most {MAX_BITS} are supported")
    if symmetric:
        negative = slice(None, 0 if table[0] == 0 else None, -1)
        table = np.concatenate([-table[negative], table])
        places = np.concatenate([places[negative] | 1 << bits - 1, places])
    numbers = tuple(table.tolist()), tuple(to_nearest(table, places, ties).tolist()), tuple(places.tolist())
    return TableFormat(name, *numbers, bits, f"nearest, ties {TIES[ties]}", **more)


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_HIF8 = sorted({*range(0x80)} - {0x6F}, key=_hifloat8)  # codes in order of their values, without that of infinity


# --- maps of optimizer states ----------------------------------------------------------------------------------------


def _map(name: str, numbers: Iterable[float]) -> TableFormat:
    values = np.array(sorted(numbers), np.float32)
    limits = tuple(float(_first_up(*pair)) for pair in pairwise(values))
    bits, rule = int(np.log2(len(values))), "nearest in float32, ties to the larger value"
    return TableFormat(name, tuple(values.tolist()), limits, tuple(range(len(values))), bits, rule)


def _first_up(below: np.float32, above: np.float32) -> np.float32:
    """Return the smallest float32 at least as near to ``above`` as to ``below``, with float32 differences."""
    x = np.float32((np.float64(below) + np.float64(above)) / 2)
    half = (above - below) * np.float32(0.5)
    while x - below >= half:
        x = np.nextafter(x, below)
    while x - below < half:
        x = np.nextafter(x, above)
    return x


def _dynamic(signed: bool, exponents: int, bits: int) -> list[float]:
    """Return the values of a dynamic map, unsorted: ``exponents`` decades, each with twice the steps of the last."""
    lowest, values = bits - 1 - exponents, [0.0, 1.0]
    decades = [(10 ** (i + 1 - exponents), 1 << i + lowest + (not signed)) for i in range(exponents)]
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
    "HIF8": lambda: _nearest(
        "HIF8", list(map(_hifloat8, _HIF8)), _HIF8, "away",
        inf_code=0x6F, nan_code=NAR, missing=(-49152.0, 49152.0), scale_to=CENTRED,
    ),
    "POSIT8": lambda: _tapered("POSIT8", partial(_posit, exponent_bits=2)),
    "POSIT8_0": lambda: _tapered("POSIT8_0", partial(_posit, exponent_bits=0)),
    "TAKUM8": lambda: _tapered("TAKUM8", _takum),
    # log2 as 4.3 fixed point in two's complement; zero in place of the lowest.
    "LNS8": lambda: _nearest("LNS8", [0, *np.exp2(np.arange(-63, 64) / 8)], [*range(64, 128), *range(64)], "up"),
    "NF4": lambda: _nearest("NF4", _NF4, range(16), "up", symmetric=False),
    "dynamic8": lambda: _map("dynamic8", _dynamic(True, 7, 8)),
    "unsigned_dynamic8": lambda: _map("unsigned_dynamic8", _dynamic(False, 7, 8)),
    "dynamic4": lambda: _map("dynamic4", _dynamic(True, 3, 4)),
    "unsigned_linear4": lambda: _map("unsigned_linear4", [i / 16 for i in range(1, 17)]),
}  # fmt: skip
TABLES = tuple(_MAKERS)


@cache
def named_table(name: str) -> TableFormat:
    """Return the format called ``name``, one of `TABLES`."""
    return _MAKERS[name]()
