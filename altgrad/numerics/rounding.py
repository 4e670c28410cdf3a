"""Rounding to a format. This package's README says why it is exact, and which rounding runs when.

`round_to_grid` is the hot path: nearest-even with saturation, in float32, about fifteen element-wise operations on the
magnitude that a compiler fuses into one pass. The spacing of values comes from float32's own, ``succ(x) - x``; adding
and subtracting an anchor whose ulp is that spacing lets the float32 adder round. There is no bit access, logarithm,
division or cast, and flushing float32 subnormals to zero changes nothing.

`round_to_grid_stochastic` rounds stochastically, with the same spacing.

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
