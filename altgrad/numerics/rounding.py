"""Rounding to a format. This package's README says why it is exact, and which rounding runs when.

`round_to_grid` is the hot path: nearest-even with saturation, in float32, about fifteen element-wise operations on the
magnitude that a compiler fuses into one pass. The spacing of values comes from float32's own, ``succ(x) - x``; adding
and subtracting an anchor whose ulp is that spacing lets the float32 adder round. There is no bit access, logarithm,
division or cast, and flushing float32 subnormals to zero changes nothing.

`round_to_grid_stochastic` rounds stochastically, with the same spacing and the random numbers of `uniform`.

`round_float64` is the general path: every mode and overflow policy, for any format, by its values and thresholds in
float64.
"""

import torch
from torch import Tensor

from altgrad.formats import FloatFormat, Format
from altgrad.numerics import loops
from altgrad.numerics.compile_utils import constant_in_graphs
from altgrad.numerics.constants import (
    ANCHOR,
    BITS,
    LANES,
    MAX,
    MULTIPLIERS,
    ROOT,
    ROUNDS,
    SPACING,
    ULPS,
    WEYL,
    ZERO,
    loops_take,
    table_of,
)

ROUNDING_MODES = ("nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic")
OVERFLOW_POLICIES = ("saturate", "overflow")

# x times this is 0.5 to 1.5 float32 ulps of x, so x plus it rounds to the next float32.
SUCCESSOR = 2.0**-24 * (1 + 2.0**-23)
# An amax times its own scale may exceed the target by a rounding of each, 2^-23 in all. That does not count as
# overflow: some formats would show it more often than others.
OVERFLOW_SLACK = 1 + 2.0**-22


def round_to_grid(x: Tensor, constants: Tensor) -> Tensor:
    """Return ``x`` rounded by the format's own rule, saturating: a float format's is to nearest, ties to the even code.

    Exact for every float32: NaN stays NaN, an infinity becomes the largest value of its sign, -0 stays -0 where the
    format has it. Carries no gradient.

    Args:
        x: float32, any shape.
        constants: the format, from `format_constants`, on the device of ``x``.

    Returns:
        float32, the shape of ``x``, values of the format.

    Raises:
        TypeError: ``x`` is not float32.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"x: expected torch.float32, got {x.dtype}")
    if (table := table_of(constants)) is not None:
        if x.device.type == "cpu" and loops_take(constants) and loops.available():
            return torch.ops.altgrad.round_values(x, constants)
        return torch.where(x.isnan(), x, table.values[table.place(x)])
    magnitude = torch.minimum(x.abs(), constants[MAX])
    spacing = grid_spacing(magnitude, constants)
    root = spacing.sqrt()
    anchor = spacing * constants[ANCHOR] + (root * root) * constants[ROOT]
    rounded = (magnitude + anchor) - anchor
    return torch.copysign(rounded, x) + constants[ZERO]


def round_to_grid_stochastic(x: Tensor, constants: Tensor, random: Tensor) -> Tensor:
    """Return ``x`` rounded stochastically to one of the two nearest representable values, saturating.

    |x| goes up with a probability of its distance above the lower magnitude, in spacings. NaN stays NaN. No gradient.

    Args:
        x: float32, any shape.
        constants: the format, from `format_constants`.
        random: float32 in (0, 1), the shape of ``x``, such as `uniform` returns. Where it is below that distance,
            |x| is rounded up.

    Returns:
        float32, the shape of ``x``, values of the format.
    """
    if (table := table_of(constants)) is not None:
        place = table.interval(x)
        below, above = table.values[place], table.values[place + 1]
        nearer, farther = torch.where(x < 0, above, below), torch.where(x < 0, below, above)
        rest = (x - nearer).abs() / table.spacings[place]
        return torch.where(x.isnan(), x, torch.where(random < rest, farther, nearer))
    magnitude = torch.minimum(x.abs(), constants[MAX])
    spacing = grid_spacing(magnitude, constants)
    steps = magnitude / spacing
    below = steps.floor()
    rounded = torch.minimum((below + (random < steps - below)) * spacing, constants[MAX])
    return torch.copysign(rounded, x) + constants[ZERO]


def grid_spacing(x: Tensor, constants: Tensor) -> Tensor:
    """Return the format's spacing at ``x``, float32: on a value the spacing away from zero, beyond the range the last.

    NaN gives NaN for a float format, any spacing for a table.
    """
    if (table := table_of(constants)) is not None:
        return table.spacings[table.interval(x)]
    magnitude = torch.minimum(x.abs(), constants[MAX])
    ulp = (magnitude + magnitude * SUCCESSOR) - magnitude
    return torch.maximum(ulp * constants[ULPS], constants[SPACING])


def overflows(scaled: Tensor, constants: Tensor) -> Tensor:
    """Return where float32 ``scaled`` lies beyond the format's range, bool of the same shape."""
    # OVERFLOW_SLACK as a literal: a module's float would be a symbol in dynamic graphs, which no Function takes.
    if (table := table_of(constants)) is not None:
        lowest, largest = table.values[0] * (1 + 2.0**-22), table.values[-1] * (1 + 2.0**-22)
        return (scaled < lowest) | (scaled > largest)
    return scaled.abs() > constants[MAX] * (1 + 2.0**-22)


def round_float64(
    x: Tensor, fmt: Format, rounding: str, overflow: str, random: Tensor | None = None, random_bits: int = 0
) -> Tensor:
    """Return ``x`` rounded to ``fmt`` in any mode.

    Under ``overflow`` a finite value beyond the range becomes the largest value if the mode points towards zero there:
    ``toward-zero``, ``up`` below zero, ``down`` above. Stochastic rounding goes away from zero where
    ``rest + (2 r + 1) / 2^(n + 1) >= 1``, with ``rest`` the fraction of the spacing left over and r one of 2^n equally
    likely integers: the probability is ``rest`` to the nearest multiple of 2^-n.

    Args:
        x: float64, any shape.
        fmt: the format.
        rounding: one of `ROUNDING_MODES`.
        overflow: one of `OVERFLOW_POLICIES`.
        random: stochastic only: integers in [0, 2^random_bits), the shape of ``x``.
        random_bits: stochastic only: n above.

    Returns:
        float64, the shape of ``x``.
    """
    *line, (lowest, largest, *ends) = _in_order(fmt)
    values, thresholds = (t.to(x.device) for t in line)
    x = x if fmt.signed else torch.where(x >= 0, x, torch.nan)
    inside, negative = x.clamp(*ends), x < 0
    if rounding == "nearest-even":
        rounded = values[torch.bucketize(inside, thresholds, right=True)]
    else:
        left, right = (torch.bucketize(inside, values, right=right) for right in (False, True))
        place = torch.where(negative, left, right).clamp(1, len(values) - 1)
        below, above = values[place - 1], values[place]
        nearer, farther = torch.where(negative, above, below), torch.where(negative, below, above)
        rest = (inside - nearer).abs() / (above - below)
        if rounding == "nearest-away":
            away = rest >= 0.5
        elif rounding == "stochastic":
            assert random is not None
            away = rest >= 1 - (2.0 * random.double() + 1) * 2.0 ** -(random_bits + 1)
        else:
            away = (inside != nearer) & _points_away(negative, rounding)
        rounded = torch.where(away | (inside == farther), farther, nearer)
    beyond = (rounded < lowest) | (rounded > largest)
    rounded = rounded.clamp(lowest, largest)
    if fmt.has_negative_zero:
        rounded = torch.copysign(rounded, x)
    if overflow == "overflow":
        directed = rounding in ("toward-zero", "up", "down")
        leaves = x.isinf() | (beyond & _points_away(negative, rounding) if directed else beyond)
        outside = torch.copysign(torch.full_like(x, torch.inf), x) if fmt.has_inf else torch.nan
        rounded = torch.where(leaves, outside, rounded)
    return torch.where(x.isnan(), x, rounded)


@constant_in_graphs
def _in_order(fmt: Format) -> tuple[Tensor, Tensor, tuple[float, ...]]:
    """Return `Format.extended` as tensors, and the lowest and largest of `Format.values` and of the extended ones."""
    values, thresholds = fmt.extended
    ends = tuple(float(line[place]) for line in (fmt.values, values) for place in (0, -1))
    return torch.tensor(values), torch.tensor(thresholds), ends


def binade(magnitude: Tensor, fmt: FloatFormat) -> Tensor:
    """Return ``max(floor(log2(magnitude)), emin)`` from the exponent bits: float64 in, int64 out.

    For infinities and NaN, 1023.
    """
    return ((magnitude.view(torch.int64) >> 52) - 1023).clamp(fmt.emin, 1023)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` exactly: int64 in -1022..1023 in, float64 out."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _points_away(negative: Tensor, rounding: str) -> Tensor:
    """Return where a directed mode ``rounding`` points away from zero: bool."""
    if rounding == "toward-zero":
        return torch.zeros_like(negative)
    return negative if rounding == "down" else ~negative


# --- random numbers ---------------------------------------------------------------------------------------------------
# Random numbers that are a function of a stream and a place, so that a resumed run draws the same ones.
#
# A generator's state would have to be stored with every checkpoint and would tie the numbers to the order of the draws.
# Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) has no state: it
# enciphers a counter of 128 bits, and a compiler fuses it with the rounding.
#
# A stream is (seed, tensor, step). Its counters are (block, step, tensor, seed), a 32-bit word each. Two streams share
# no counter; under one key Philox is a bijection of its counters, so they share no block of numbers either, at any
# shift.

_WORD = (1 << 32) - 1


def uniform(shape: torch.Size, stream: Tensor, first: int = 0) -> Tensor:
    """Return numbers uniform over the odd multiples of 2^-24 in (0, 1): float32, on the device of ``stream``.

    Args:
        shape: shape of the result, below 2^31 elements.
        stream: seed, tensor and step, each from 0 to below 2^32: int64, shape (3,).
        first: place of the first element in the stream; not 0 for a part of a tensor.
    """
    count = 1
    for length in shape:
        count = count * length
    bits = words(count, stream, first) >> (32 - BITS)
    return (bits * 2 + 1).view(shape).float() * 2.0 ** -(BITS + 1)


def words(count: int, stream: Tensor, first: int = 0) -> Tensor:
    """Return ``count`` words of a stream from place ``first`` (below 2^34) on: int64, uniform over 0 to 2^32 - 1."""
    seed, tensor, step = stream
    row, rest = first // (4 * LANES), first % (4 * LANES)  # which graphs of any size know, unlike divmod
    rows = (rest + count + 4 * LANES - 1) // (4 * LANES)
    blocks = torch.arange(row * LANES, (row + rows) * LANES, dtype=torch.int64, device=stream.device).view(-1, LANES)
    # Adding 0 loaded from memory keeps the places 64 bits wide: the compiler for GPUs would give them 32, which their
    # products with the multipliers do not fit.
    blocks = blocks + (seed >> 32)
    return torch.stack(philox((blocks, step, tensor, seed), (0, 0)), dim=1).flatten()[rest : rest + count]


def permutation(count: int, seed: int, tensor: int) -> Tensor:
    """Return a random permutation of 0 to count - 1, int32: the sort order of 63 bits each, drawn at step 0."""
    low, high = words(2 * count, torch.tensor([seed, tensor, 0])).view(2, -1)
    return torch.argsort((high << 31) | (low >> 1), stable=True).int()


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 at ``counter`` under ``key``.

    Words are int64 from 0 to 2^32 - 1; the counter's four broadcast. A product of two words wraps at 2^64 as two's
    complement, and masking its upper word removes the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> 32) & _WORD ^ c1 ^ k0, p1 & _WORD
        c2, c3 = (p0 >> 32) & _WORD ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return torch.broadcast_tensors(c0, c1, c2, c3)
