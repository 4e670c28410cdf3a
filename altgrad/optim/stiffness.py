"""Stiffness S: the spacing of the representable values around each weight, and formulas to compare it with.

If u is the position of a weight in code steps of its format (rungs), ``du/dw = 1/S``. An update times S is therefore
measured in code steps.
"""

import math
from typing import Self

import torch
from torch import Tensor

from altgrad.config.arms import FORMULAS, OF_FLOATS
from altgrad.formats import FloatFormat, Format, get_format
from altgrad.numerics import (
    amax,
    format_constants,
    grid_spacing,
    operand_scale,
    permutation,
    scale_from_amax,
)
from altgrad.numerics.constants import FLOAT32_MANTISSA, MAX, SPACING, ULPS, table_of
from altgrad.numerics.rounding import SUCCESSOR
from altgrad.numerics.scaling import rms

# Lower bound of `mantissa`, relative to the tensor's largest stiffness: it avoids division by zero and lets a weight
# cross zero. The other formulas are positive by themselves.
FLOOR = 2.0**-24

LEAST_RMS = 1e-3  # Adafactor's second epsilon: weights of zero still move
SMALLEST, LARGEST = 2.0**-62, 2.0**62  # numbers in between have squares in float32's range
TINY = 2.0**-126  # the smallest normal float32 number: a divisor for a tensor of zeros

# Indices into `Stiffness.numbers`. PER_BINADE is 2^-M (M: mantissa bits), KNEE is 2^-knee, OF_RMS is 1 or 0.
PER_BINADE, SMALLEST_NORMAL, PER_RANGE, KNEE, SLOPE, OF_RMS = range(6)


def stiffness(
    weight: Tensor,
    fmt: str | Format,
    formula: str = "ulp",
    *,
    scale: Tensor | None = None,
    foreign: str | Format | None = None,
    knee: float | None = None,
    slope: float | None = None,
    seed: int = 0,
    dim: int = -1,
) -> Tensor:
    """Return the stiffness of each weight, in the weight's unit; for `profile`, in that unit to the power ``slope``.

    ========== ==============================================================================================
    ulp        ``ulp(w s) / s``: the spacing of the quantization grid at w; around 0 that of the smallest binade
    mantissa   ``2^(floor(log2 |w|) - M)``: no scale, no subnormal numbers; of float formats, as is `smooth`
    smooth     ``sqrt(w^2 + w0^2) 2^-M``, ``w0 s`` the smallest normal value: `ulp` without its jumps
    range      `ulp` divided by the format's range in binades, ``log2(largest / smallest)``
    mean       the mean of `ulp` over the tensor: a control, no geometry
    permuted   `ulp`, shuffled within the tensor: a control with the same histogram
    foreign    `ulp` of another format at its own scale: a control with another geometry
    profile    ``(w^2 + w0^2)^(slope / 2)``, ``w0 = 2^-knee max |w|``: a control that looks at no format
    rms        ``max(RMS(w), 1e-3)`` of the tensor, Adafactor's parameter scaling: a control, relative steps
    row_rms    `rms` of each output row
    ========== ==============================================================================================

    Args:
        weight: float32 or float64, (out, in) or any shape.
        fmt: the weight's format, or its name.
        formula: a name in the table above.
        scale: the weight's scale s, broadcastable; default: the scale from its amax. `foreign` ignores it.
        foreign: the other format, for `foreign` only.
        knee: for `profile` only, in binades below the tensor's largest weight, 0 to 62.
        slope: for `profile` only, 0 to 2. At 0 all weights have the same stiffness, at 1 it is proportional to the
            weight. Slope 1 with the knee at the format's smallest normal number is `smooth` up to a factor.
        seed: seed of the shuffle of `permuted`.
        dim: the dimension that the forward product sums over; `row_rms` takes its means along it.

    Returns:
        Positive, with the shape and dtype of ``weight``.

    Raises:
        ValueError: unknown formula; ``foreign``, ``knee`` or ``slope`` missing for its formula or given for another.

    Source of `rms`: Shazeer & Stern 2018 (arXiv:1804.04235), section 8. LAMB's trust ratio (You et al. 2020) is akin.
    """
    stiff = Stiffness(get_format(fmt), formula, foreign, knee=knee, slope=slope).to(weight.device)
    if scale is None:
        scale = operand_scale(weight, stiff.constants, statistic=get_format(fmt).scale_statistic)
    order = permutation(weight.numel(), seed, 0).to(weight.device) if formula == "permuted" else None
    return stiff(weight.detach(), scale, order, dim)


def exponent(schedule: str, progress: float) -> float:
    """Return the exponent of the stiffness at ``progress`` (0 to 1) of the run: from 1 to 0; always 1 if constant."""
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1 + math.cos(math.pi * progress))


class Stiffness:
    """`stiffness` for one format and formula. Its parameters are tensors, so that one compiled graph serves all."""

    def __init__(
        self, fmt: Format, formula: str, foreign: str | Format | None = None, *,
        knee: float | None = None, slope: float | None = None,
    ) -> None:  # fmt: skip
        if formula not in FORMULAS:
            raise ValueError(f"formula: expected one of {', '.join(FORMULAS)}, got {formula!r}")
        if (formula == "foreign") != (foreign is not None):
            raise ValueError("foreign: needed by the formula of that name, and by no other")
        if {knee is not None, slope is not None} != {formula == "profile"}:
            raise ValueError("knee and slope: needed by the formula profile, and by no other")
        foreign = None if foreign is None else get_format(foreign)
        self.format, self.formula = fmt, formula
        if not isinstance(fmt, FloatFormat) and formula in OF_FLOATS:
            raise ValueError(f"formula: {formula} needs mantissa bits, which {fmt.name} does not have; take ulp, say")
        self.constants = format_constants(foreign or fmt)
        numbers = [0.0] * 6
        numbers[OF_RMS] = float((foreign or fmt).scale_statistic == "rms")
        if isinstance(fmt, FloatFormat):
            bits = fmt.mantissa_bits - (fmt.exponent_bits == 0)  # up to the scale, E0My has the values of E1M(y-1)
            numbers[PER_BINADE] = 2.0**-bits
            numbers[SMALLEST_NORMAL] = 2.0**bits * float(self.constants[SPACING])
        numbers[PER_RANGE] = 1 / fmt.binades
        if knee is not None and slope is not None:
            numbers[KNEE], numbers[SLOPE] = 2.0**-knee, slope
        self.numbers = torch.tensor(numbers, dtype=torch.float32)

    def to(self, device: torch.device) -> Self:
        """Move the tensors to ``device`` and return self."""
        self.constants, self.numbers = self.constants.to(device), self.numbers.to(device)
        return self

    def __call__(self, weight: Tensor, scale: Tensor, order: Tensor | None = None, dim: int = -1) -> Tensor:
        """Return the stiffness of ``weight``; ``order``: shuffle for `permuted`; ``dim``: as in `stiffness`."""
        return evaluate(self.formula, weight, scale, self.constants, self.numbers, order, dim)


def evaluate(
    formula: str, weight: Tensor, scale: Tensor, constants: Tensor, numbers: Tensor, order: Tensor | None, dim: int
) -> Tensor:
    """Compute `Stiffness.__call__` from tensors alone, so that one compiled graph serves every format."""
    if formula == "mantissa":
        found = _power_of_two_below(weight.abs()) * numbers[PER_BINADE]
        return torch.maximum(found, found.amax() * FLOOR)
    if formula == "smooth":
        w0 = numbers[SMALLEST_NORMAL] / scale
        return torch.hypot(weight, w0) * numbers[PER_BINADE]  # hypot: a square would underflow
    if formula == "profile":
        return _profile(weight, numbers[KNEE], numbers[SLOPE])
    if formula in ("rms", "row_rms"):
        squares = weight.square()
        mean = squares.mean(dtype=torch.float64) if formula == "rms" else squares.mean(dim, True, dtype=torch.float64)
        return mean.sqrt().clamp_min(LEAST_RMS).to(weight.dtype).expand_as(weight)
    if formula == "foreign":
        largest = torch.where(numbers[OF_RMS] > 0, rms(weight), amax(weight))
        scale = scale_from_amax(largest, constants).to(weight.dtype)
    found = _spacing(weight * scale, constants) / scale
    if formula == "range":
        return found * numbers[PER_RANGE]
    if formula == "mean":
        return found.mean().expand_as(weight)
    if formula == "permuted":
        return found.flatten()[order].view_as(found)
    return found


def _profile(weight: Tensor, knee: Tensor, slope: Tensor) -> Tensor:
    """Return the stiffness `profile`: a power of ``|w| / max |w|``, times a bounded power of ``max |w|``.

    The bound keeps the result's root mean square in float32's range for any size of weights.
    """
    largest = weight.abs().amax()
    share = torch.where(largest > 0, weight / largest.clamp_min(TINY), 1.0)
    return torch.hypot(share, knee).pow(slope) * largest.pow(slope).clamp(SMALLEST, LARGEST)


def _spacing(x: Tensor, constants: Tensor) -> Tensor:
    if x.dtype != torch.float64 or table_of(constants) is not None:
        return grid_spacing(x, constants).to(x.dtype)
    magnitude = torch.minimum(x.abs(), constants[MAX].double())
    per_binade = constants[ULPS].double() * 2.0**-FLOAT32_MANTISSA
    return torch.maximum(_power_of_two_below(magnitude) * per_binade, constants[SPACING].double())


def _power_of_two_below(magnitude: Tensor) -> Tensor:
    """Return ``2^floor(log2 x)``; 0 for 0 and for float32 numbers below 2^-102."""
    if magnitude.dtype == torch.float64:  # for checks of the manifold, never compiled
        return torch.where(magnitude == 0, 0.0, torch.exp2(torch.frexp(magnitude).exponent.double() - 1))
    return ((magnitude + magnitude * SUCCESSOR) - magnitude) * 2.0**FLOAT32_MANTISSA
