"""Rounding to a format. This package's README says why it is exact, and which rounding runs when.

`round_to_grid` is the hot path: nearest-even with saturation, in float32, about fifteen element-wise operations on the
magnitude that a compiler fuses into one pass. The spacing of values comes from float32's own, ``succ(x) - x``; adding
and subtracting an anchor whose ulp is that spacing lets the float32 adder round. There is no bit access, logarithm,
division or cast, and flushing float32 subnormals to zero changes nothing.

`round_to_grid_stochastic` rounds stochastically, with the same spacing and the random numbers of `uniform`.

`round_float64` is the general path: every mode and overflow policy, for any format, in float64 where every quotient is
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.formats import Format
from altgrad.numerics.constants import ANCHOR, MAX, ROOT, SPACING, ULPS, ZERO

ROUNDING_MODES = ("nearest-even", "nearest-away", "toward-zero", "up", "down", "stochastic")
OVERFLOW_POLICIES = ("saturate", "overflow")

# x times this is 0.5 to 1.5 float32 ulps of x, so x plus it rounds to the next float32.
SUCCESSOR = 2.0**-24 * (1 + 2.0**-23)
# An amax times its own scale may exceed the target by a rounding of each, 2^-23 in all. That does not count as
# overflow: some formats would show it more often than others.
OVERFLOW_SLACK = 1 + 2.0**-22


def round_to_grid(x: Tensor, constants: Tensor) -> Tensor:
    """Return ``x`` rounded to the nearest representable value, ties to the even code, saturating.

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
    magnitude = torch.minimum(x.abs(), constants[MAX])
    spacing = grid_spacing(magnitude, constants)
    steps = magnitude / spacing
    below = steps.floor()
    rounded = torch.minimum((below + (random < steps - below)) * spacing, constants[MAX])
    return torch.copysign(rounded, x) + constants[ZERO]


def grid_spacing(magnitude: Tensor, constants: Tensor) -> Tensor:
    """Return the format's spacing just above ``magnitude``, which is float32 and at most the largest value."""
    ulp = (magnitude + magnitude * SUCCESSOR) - magnitude
    return torch.maximum(ulp * constants[ULPS], constants[SPACING])


def overflows(scaled: Tensor, constants: Tensor) -> Tensor:
    """Return where float32 ``scaled`` lies beyond the format's largest value, bool of the same shape."""
    # OVERFLOW_SLACK as a literal: a module's float would be a symbol in dynamic graphs, which no Function takes.
    return scaled.abs() > constants[MAX] * (1 + 2.0**-22)


def round_float64(
    x: Tensor,
    fmt: Format,
    rounding: str,
    overflow: str,
    random: Tensor | None = None,
    random_bits: int = 0,
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
    negative = torch.signbit(x)
    magnitude = _magnitude(x, fmt)

    exponent = binade(magnitude, fmt)
    spacing = power_of_two(exponent - fmt.mantissa_bits)
    scaled = magnitude / spacing
    whole = scaled.floor()
    rest = scaled - whole

    if rounding == "nearest-even":
        away = (rest > 0.5) | ((rest == 0.5) & _code_is_odd(whole, exponent, fmt))
    elif rounding == "nearest-away":
        away = rest >= 0.5
    elif rounding == "toward-zero":
        away = torch.zeros_like(negative)
    elif rounding == "stochastic":
        assert random is not None
        away = rest >= 1 - (2.0 * random.double() + 1) * 2.0 ** -(random_bits + 1)
    else:
        away = (rest > 0) & (negative if rounding == "down" else ~negative)
    rounded = (whole + away) * spacing

    beyond = torch.full_like(rounded, fmt.max)
    if overflow == "overflow":
        stays = magnitude.isfinite() & ~_may_leave_range(negative, rounding)
        beyond.masked_fill_(~stays, torch.inf if fmt.has_inf else torch.nan)
    rounded = torch.where(rounded > fmt.max, beyond, rounded)
    if not fmt.signed:
        return rounded
    rounded = torch.copysign(rounded, x)
    return rounded if fmt.has_negative_zero else torch.where(rounded == 0, 0.0, rounded)


def binade(magnitude: Tensor, fmt: Format) -> Tensor:
    """Return ``max(floor(log2(magnitude)), emin)`` from the exponent bits: float64 in, int64 out.

    For infinities and NaN, 1023.
    """
    return ((magnitude.view(torch.int64) >> 52) - 1023).clamp(fmt.emin, 1023)


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2^exponent`` exactly: int64 in -1022..1023 in, float64 out."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _magnitude(x: Tensor, fmt: Format) -> Tensor:
    """Return |x|, raised where it is so small that dividing by the spacing could underflow to zero.

    All of (0, 2^-64 spacing) rounds alike in each mode. In an unsigned format negative numbers become NaN; in a format
    without zero the magnitude is at least its smallest value.
    """
    magnitude = x.abs() if fmt.signed else torch.where(x >= 0, x.abs(), torch.nan)
    if not fmt.has_zero:
        return magnitude.clamp_min(fmt.smallest)
    return torch.where(magnitude > 0, magnitude.clamp_min(fmt.smallest * 2.0**-64), magnitude)


def _code_is_odd(whole: Tensor, exponent: Tensor, fmt: Format) -> Tensor:
    """Return whether the code just below is odd; for M = 0 the code is the exponent field, which is 0 for zero."""
    if fmt.mantissa_bits > 0:
        halves = whole * 0.5
        return halves.floor() != halves
    field = exponent - fmt.emin + int(fmt.has_zero)
    return (whole > 0) & (field % 2 == 1)


def _may_leave_range(negative: Tensor, rounding: str) -> Tensor:
    """Return where mode ``rounding`` may round a finite value beyond the range to infinity: bool."""
    if rounding == "toward-zero":
        return torch.zeros_like(negative)
    if rounding in ("up", "down"):
        return negative if rounding == "down" else ~negative
    return torch.ones_like(negative)


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

BITS = 23  # of randomness: (2 k + 1) / 2^24 is exact in float32 for each of them
LANES = 16  # blocks side by side: word w of the block in lane l is for place 16 w + l, so that loops need no shuffling
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key's words from round to round

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
