"""A format as one small tensor, which is how it enters a compiled graph.

`torch.compile` bakes Python numbers into the code that it generates, so numbers of a format would cost one compilation
per format. In a tensor they are data, and one compiled graph serves every format.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from altgrad.formats import SCALE_FORMATS, FloatFormat, Format, get_format
from altgrad.formats.floats import FLOAT32_MANTISSA
from altgrad.formats.format import in_float32
from altgrad.formats.tables import TableFormat
from altgrad.numerics.compile_utils import constant_in_graphs

# Places in the packed tensor.
MAX, ULPS, SPACING, ANCHOR, ROOT, ZERO, TARGET = range(7)
SIZE = 7
# Behind the constants of a `TableFormat`: numbers, the three columns of `_lookup`, values, thresholds and spacings.
COUNT, ZERO_PLACE, FIRST, SHIFT, BUCKETS = range(5)
TABLE_NUMBERS = 6  # all of a table is an even count, so constants with a scale's format have one too, others have not
LOOKUP = 1 << 12  # most buckets of a look-up; TAKUM8 takes 4004
LEAST_PLACES = 256  # values of a table with a look-up; fewer are filled up, so that formats share a compiled graph

NAN_CODE = 0x80  # 8-bit code of NaN in operands: the code of -0, which no product needs
NO_PLACE = 0xFF  # the same of a `TableFormat`, whose codes in operands are the places of at most 255 values
LEARNS = ("nothing", "each", "first")  # which amax a history stores: none, each step's, the first step's
SCALE_RULES = ("float32", "floor", "ceil", "rceil", "even")  # float32: unrounded; the others round to a power of two
FLOAT32_RULE = SCALE_RULES.index("float32")
# Rules of block scales under a scale of the whole tensor: see `two_level`.
TWO_LEVEL, FOUR_OVER_SIX = len(SCALE_RULES), len(SCALE_RULES) + 1
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # Transformer Engine's and torchao's

# Of Philox, which draws random numbers: see `rounding.uniform`.
BITS = 23  # of randomness: (2 k + 1) / 2^24 is exact in float32 for each of them
LANES = 16  # blocks side by side: word w of the block in lane l is for place 16 w + l, so that loops need no shuffling
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key's words from round to round

# A float32 whose ulp is one, in the middle of its binade; it is even.
_EVEN_ANCHOR = 1.5 * 2.0**FLOAT32_MANTISSA
# The float32 square root of an odd power of two, squared in float32, is that power times 1 - 2^-24.
_PER_SHORTFALL = 2.0 ** (FLOAT32_MANTISSA + 1)


def format_constants(
    fmt: str | Format, device: torch.device | str | None = None, *, scale_format: str | Format = "float32"
) -> Tensor:
    """Return a format as one small tensor, which `round_to_grid` and `scale_from_amax` take.

    Args:
        fmt: a format or its name.
        device: device of the result.
        scale_format: the format of the scales. If it is neither float32 nor E8M0 (see `two_level`), the result holds
            its constants behind those of ``fmt``.

    Returns:
        float32, shape (7,), or (14,) with such a scale format. The largest magnitude of both signs; float32 ulps per
        spacing in the normal range, 2^(23 - M); the smallest spacing; the anchor in spacings, and in squared roots of
        the spacing (see `rounding`); the zero that rounding adds at the end, -0 if the format has -0, else +0; the
        scaling target. Those of a `TableFormat` have its `Table` behind them, the spacing at the scaling target in
        place of the smallest one, and zeros for what it does not have.

    Raises:
        ValueError: a format is unsigned or too wide for float32 arithmetic.
    """
    fmt = get_format(fmt)
    packed = packed_constants(fmt)
    if scale_format not in SCALE_FORMATS:
        scales = get_format(scale_format)
        if not isinstance(scales, FloatFormat):
            raise ValueError(f"scale_format: {scales.name} is a table of values; take a float format such as E4M3")
        packed += packed_constants(scales)
    constants = torch.tensor(packed, dtype=torch.float32, device=device)
    return torch.cat([constants, _table(fmt).to(constants.device)]) if isinstance(fmt, TableFormat) else constants


def scale_constants(constants: Tensor) -> Tensor:
    """Return the constants of the scale's format, float32 (7,); ``ValueError`` if ``constants`` lack them."""
    if constants.numel() % 2 == 1:
        raise ValueError("constants: expected those of the scale's format too, from format_constants(scale_format=...)")
    return constants[SIZE : 2 * SIZE]


class Table(NamedTuple):
    """A format's values in `format_constants`, filled up to P >= 256 places; each is float32.

    Attributes:
        numbers: (6,): how many values there are, the place of zero (or of the smallest positive value), and the
            numbers of `_lookup`.
        values: (P,), ascending; behind the largest value its copies.
        thresholds: (P,): the smallest float32 that is rounded to each value, -Inf for the lowest, Inf where none is.
        spacings: (P,): the distance from each value to the next, positive.
    """

    numbers: Tensor
    values: Tensor
    thresholds: Tensor
    spacings: Tensor

    def place(self, x: Tensor) -> Tensor:
        """Return the place, int64, of the value that each ``x`` (float32 or float64) is rounded to."""
        return torch.bucketize(x, self.thresholds.to(x.dtype), right=True) - 1

    def interval(self, x: Tensor) -> Tensor:
        """Return the place, int64, of the value below each ``x``; of a negative value itself, the one before it.

        So the other end of the interval lies away from zero. Beyond the largest and lowest value it is the last
        interval.
        """
        values = self.values.to(x.dtype)
        below = torch.where(x < 0, torch.bucketize(x, values), torch.bucketize(x, values, right=True)) - 1
        return torch.minimum(below, self.numbers[COUNT].long() - 2).clamp(min=0)


def loops_take(constants: Tensor) -> bool:
    """Whether loops and kernels round to the format: they take all float formats, and tables with a look-up."""
    table = table_of(constants)
    return table is None or table.values.numel() == LEAST_PLACES


def table_start(constants: Tensor) -> int:
    """Return the index in ``constants`` at which the table begins; 0 if there is none: a float format's have none."""
    start = SIZE if constants.numel() % 2 else 2 * SIZE
    return start if constants.numel() > start else 0


def table_of(constants: Tensor) -> Table | None:
    """Return the table in ``constants``, or None: a float format's have none."""
    start = table_start(constants)
    if start == 0:
        return None
    places = (constants.numel() - start - TABLE_NUMBERS) // 3 - LOOKUP
    _, numbers, values, thresholds, spacings = constants.split([start, TABLE_NUMBERS + 3 * LOOKUP, *[places] * 3])
    return Table(numbers[:TABLE_NUMBERS], values, thresholds, spacings)


@constant_in_graphs
@cache
def _table(fmt: TableFormat) -> Tensor:
    """Return the `Table` of ``fmt`` as one tensor, the look-up behind its numbers."""
    values, thresholds = in_float32(fmt.values, fmt.thresholds)
    lookup = _lookup(values, thresholds)
    places = LEAST_PLACES if lookup else max(2 * LEAST_PLACES, 1 << (len(values) - 1).bit_length())
    numbers = np.zeros(TABLE_NUMBERS, np.float32)
    numbers[[COUNT, ZERO_PLACE]] = len(values), np.searchsorted(values, 0.0)
    numbers[[FIRST, SHIFT, BUCKETS]], columns = lookup or ((0, 0, 0), np.zeros(3 * LOOKUP, np.float32))
    more = (0, places - len(values))
    parts = [
        numbers, columns,
        np.pad(values, more, "edge"),
        np.pad(thresholds, (1, more[1]), constant_values=(-np.inf, np.inf)),
        np.pad(np.diff(values), (0, more[1] + 1), "edge"),
    ]  # fmt: skip
    return torch.from_numpy(np.concatenate(parts))


def _lookup(values: np.ndarray, thresholds: np.ndarray) -> tuple[tuple[int, int, int], np.ndarray] | None:
    """Return a look-up of the value that a float32 is rounded to, for loops and kernels.

    A number's key is ``(bits + 2^shift - 1) >> shift``, with the bits of its float32 magnitude. Keys outside the first
    and the last bucket belong to these. Buckets of negative numbers lie behind all others. A bucket has a limit and two
    values: magnitudes from the limit on take the second. The first bucket has zero and the numbers next to it.

    Returns:
        ((first key, shift, buckets of one sign), limits and, behind them, pairs of values: float32 (3 LOOKUP,)); None
        if that takes more than `LOOKUP` buckets or more than `LEAST_PLACES` values.
    """
    magnitudes = np.abs(thresholds[np.isfinite(thresholds)])
    bits = np.sort(magnitudes[magnitudes > 2.0**-149]).view(np.uint32)
    for shift in range(22, 12, -1) if 0 < len(bits) < LEAST_PLACES else ():
        first, last = (int(end + (1 << shift) - 1) >> shift for end in (bits[0], bits[-1] + 1))
        if 2 * (last - first + 2) > LOOKUP:
            return None
        keys = np.arange(first, last + 1)
        starts = np.insert((keys - 1 << shift) + 1, 0, 0)
        ends = np.insert(np.minimum(keys << shift, 0x7F7FFFFF), 0, 1)
        near, far = _places(thresholds, starts), _places(thresholds, ends)
        if np.abs(far - near).max() > 1:
            continue
        # A number leaves its place at the threshold above it; below zero, just beyond the threshold below it.
        crossed = thresholds[np.minimum(near, far).clip(max=len(thresholds) - 1)]
        limits = np.abs(np.where(far > near, crossed, np.nextafter(crossed, np.float32(-np.inf))))
        limits[[0, len(starts)]] = 2.0**-149
        found = np.zeros((3, LOOKUP), np.float32)
        found[0, : len(near)] = limits
        found[1:].reshape(-1, 2)[: len(near)] = np.stack([values[near], values[far]], 1)
        return (first - 1, shift, len(starts)), found.ravel()
    return None


def _places(thresholds: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return the places that magnitudes with these float32 bits are rounded to; behind them those of the negatives."""
    x = bits.astype(np.uint32).view(np.float32)
    return np.searchsorted(thresholds, np.concatenate([x, -x]), "right")


@constant_in_graphs
def packed_constants(fmt: Format) -> tuple[float, ...]:
    """Return the seven constants of ``fmt`` from `format_constants` as Python numbers."""
    return _packed(fmt)


@cache
def _packed(fmt: Format) -> tuple[float, ...]:
    if not fmt.rounds_in_float32:
        raise ValueError(f"fmt: {fmt} is not a signed format well inside float32's range")
    packed = [0.0] * SIZE
    packed[TARGET] = fmt.scale_target
    if not isinstance(fmt, FloatFormat):
        values = in_float32(fmt.values, fmt.thresholds)[0]
        above = np.searchsorted(values[:-1], np.float32(fmt.scale_target), "right")
        packed[MAX] = float(np.abs(values[[0, -1]]).min())
        packed[SPACING] = float(values[above] - values[above - 1])
        return tuple(packed)
    packed[MAX] = fmt.max
    packed[ULPS] = 2.0 ** (FLOAT32_MANTISSA - fmt.mantissa_bits)
    packed[SPACING] = 2.0 ** (fmt.emin - fmt.mantissa_bits)
    packed[ANCHOR] = _EVEN_ANCHOR
    if fmt.mantissa_bits == 0:
        # Codes are exponent fields, e + bias. Above an even code ties go down, so the anchor is odd there. With an odd
        # bias these are the odd e, where the shortfall adds a spacing. With an even bias they are the even e: every
        # anchor has one spacing more, and the shortfall takes it off at odd e.
        packed[ROOT] = -_PER_SHORTFALL if fmt.bias % 2 == 1 else _PER_SHORTFALL
        packed[ANCHOR] += (fmt.bias % 2 == 0) - packed[ROOT]
    packed[ZERO] = -0.0 if fmt.has_negative_zero else 0.0
    return tuple(packed)


# --- a finer grid: the same range and scales, and a spacing that is a fraction of the format's -----------------------


@cache
def refined_format(fmt: Format, refinement: int) -> Format:
    """Return a format whose codes hold every value of the refined grid; ``fmt`` itself if ``refinement`` is 1.

    The refined grid has ``refinement - 1`` evenly spaced values between any two neighbours of ``fmt``. For a float
    format the returned one has log2(refinement) more mantissa bits, and also values above ``fmt.max``. No code is
    special.

    Raises:
        ValueError: ``refinement`` is no power of two, or the result takes more than 16 bits.
    """
    if refinement == 1:
        return fmt
    if refinement < 1 or refinement & (refinement - 1):
        raise ValueError(f"refinement: expected a power of two, got {refinement}")
    name, bits = f"{fmt.name} refined {refinement} times", refinement.bit_length() - 1
    if isinstance(fmt, FloatFormat):
        return FloatFormat(name, fmt.exponent_bits, fmt.mantissa_bits + bits, fmt.bias)
    values = in_float32(fmt.values, fmt.thresholds)[0].astype(np.float64)
    places = np.arange((len(values) - 1) * refinement + 1) / refinement
    return Format.of_values(name, np.interp(places, np.arange(len(values)), values).tolist(), scale_to=fmt.scale_to)


def refined_constants(
    fmt: Format, refinement: int, device: torch.device | str | None = None, *, scale_format: str = "float32"
) -> Tensor:
    """Return `format_constants` of the refined grid: range and scaling target of ``fmt``, a finer spacing.

    Raises:
        ValueError: as `refined_format` and `format_constants`.
    """
    coarse = format_constants(fmt, device, scale_format=scale_format)
    if refinement == 1:
        return coarse
    constants = format_constants(refined_format(fmt, refinement), device, scale_format=scale_format)
    for place in (MAX, TARGET):
        constants[place] = coarse[place]
    return constants
