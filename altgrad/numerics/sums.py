"""Numbers that monitors record about a tensor: its magnitudes, what rounding does to it, its blocks, an optimizer step.

Counts are exact. Sums are float64 in an order that depends on the device, so their last digits do too.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.constants import MAX, SPACING, TARGET, TWO_LEVEL, scale_constants, table_of
from altgrad.numerics.operand import quantize_operand
from altgrad.numerics.operand_definition import operand_scale
from altgrad.numerics.rounding import grid_spacing, overflows, power_of_two, round_to_grid
from altgrad.numerics.scaling import HIGHEST, LOWEST, amax, measured, scale_by_constants, scale_rule
from altgrad.numerics.two_level import element_scale, scales_of_both_levels

PIECE = 1 << 17  # elements handled at a time: getting memory for larger tensors takes longer than the operations

# --- one tensor ------------------------------------------------------------------------------------------------------


class Magnitudes(NamedTuple):
    """Largest magnitude, number of nonzeros, sum of squares of the finite elements; ``nonfinite``: number of others."""

    amax: float
    nonfinite: int
    nonzero: int
    squares: float


class RoundingSums(NamedTuple):
    """What rounding to a format does to the finite elements of a tensor.

    ``scale``: median of the tensor's scales. ``overflowed``: elements beyond the format's largest value. ``vanished``:
    nonzero elements that become zero. ``lost``: sum of squared rounding errors, in the tensor's own unit.
    """

    scale: float
    overflowed: int
    vanished: int
    lost: float


def magnitudes(x: Tensor) -> Magnitudes:
    """Return the `Magnitudes` of ``x``, a float tensor of any shape."""
    largest, *sums = zip(*map(_magnitudes, x.reshape(-1).split(PIECE)), strict=True)
    return Magnitudes(max(largest), *map(sum, sums))


def rounding_sums(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, scale_format: str = "float32", scale_rounding: str = "rceil",
    statistic: str = "amax",
) -> tuple[Magnitudes, RoundingSums]:  # fmt: skip
    """Return the `Magnitudes` and `RoundingSums` of ``x``. Elements that are not finite do not affect the scales.

    Args:
        x: float (n, k).
        constants: the format, from `format_constants`.
        remembered: the amax (0-d float32) that sets the one scale, as in `operand_scale`.
        granularity, block, scale_format, scale_rounding: as in `quantize_operand`, with ``dim`` 1.
    """
    seen = magnitudes(x)
    scale = operand_scale(
        torch.where(x.isfinite(), x, 0) if seen.nonfinite else x, constants, remembered,
        granularity=granularity, block=block, scale_format=scale_format, scale_rounding=scale_rounding,
        statistic=statistic,
    )  # fmt: skip
    one, rows = scale.numel() == 1, max(1, PIECE // x.shape[1])
    parts = x.split(rows)
    scales = [scale] * len(parts) if one else scale.split(rows)
    found = [_rounding(part, s, one, constants) for part, s in zip(parts, scales, strict=True)]
    overflowed, kept, lost = map(sum, zip(*found, strict=True))
    unit = scale.item() ** 2 if one else 1.0
    return seen, RoundingSums(scale.median().item(), overflowed, seen.nonzero - kept, lost / unit)


def _magnitudes(x: Tensor) -> Magnitudes:
    x, nonfinite = _finite(x)
    return Magnitudes(_largest(x), nonfinite, int(torch.count_nonzero(x)), _squares(x))


def _rounding(x: Tensor, scale: Tensor, one: bool, constants: Tensor) -> tuple[int, int, float]:
    """Return (overflowed elements, nonzero values, sum of squared errors) of some rows of a tensor.

    Errors are in the tensor's unit, or still contain its ``one`` scale.
    """
    scaled = _finite(x)[0] * scale
    clamps = _largest(scaled) > constants[MAX].item()
    rounded = _rounded(scaled, constants, clamps)
    overflowed = int(torch.count_nonzero(overflows(scaled, constants))) if clamps else 0
    lost = scaled.sub_(rounded)
    return overflowed, int(torch.count_nonzero(rounded)), _squares(lost if one else lost.div_(scale))


def excess_kurtosis(x: Tensor) -> float:
    """Return the excess kurtosis of all elements of ``x``: 0 for a normal distribution, -2 at least."""
    x = x.double()
    squares = (x - x.mean()).square()
    variance, fourth = squares.mean().item(), squares.square().mean().item()
    return fourth / variance**2 - 3 if variance > 0 else 0.0


def _finite(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x`` as float32 with zeros in place of elements that are not finite, and their number."""
    x = x.float()
    if math.isfinite(_largest(x)):
        return x, 0
    finite = x.isfinite()
    return torch.where(finite, x, 0.0), int(torch.count_nonzero(~finite))


def _largest(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    least, most = x.aminmax()
    return torch.maximum(-least, most).item()


def _rounded(x: Tensor, constants: Tensor, clamps: bool = True) -> Tensor:
    """Return float32 ``x`` (n, k) rounded as `round_to_grid` does, on a CPU by the faster loops of operands.

    ``clamps``: False if all elements are in the range of the format.
    """
    if table_of(constants) is not None:
        return round_to_grid(x, constants)
    inside = x.clamp(-constants[MAX], constants[MAX]) if clamps else x
    return quantize_operand(inside, constants, constants[TARGET].reshape(1), dtype=torch.float32).values  # at scale 1


def _squares(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2


# --- the blocks of a tensor ------------------------------------------------------------------------------------------

OUTER = 0.01  # share of the blocks at either end that `BlockStatistics.spread` leaves out


class BlockStatistics(NamedTuple):
    """Shares of a tensor's blocks, and the spread of their scales.

    ``saturated``: blocks with an element beyond the format's largest value. ``clamped``: share of the sum of the
    blocks' largest magnitudes that lies beyond that value. ``empty``: blocks of zeros. ``at_limit``: share of the
    other blocks whose scale is at its limit. ``spread``: log2 of the ratio of the 99th to the 1st percentile of the
    scales of blocks that are not empty, in binades; 0 if there are none.
    """

    saturated: float
    clamped: float
    empty: float
    at_limit: float
    spread: float


def block_statistics(
    x: Tensor, constants: Tensor, *, block: int, granularity: str = "block", scale_format: str = "E8M0",
    scale_rounding: str = "rceil", statistic: str = "amax",
) -> BlockStatistics:  # fmt: skip
    """Return the `BlockStatistics` of ``x`` (n, k), float, whose blocks lie along its rows. Inf and NaN count as 0.

    The limits of an E8M0 scale are 2^-126 and 2^127. The limit of a block scale under a tensor scale is its format's
    smallest positive value, since the block of the tensor's amax always has the largest value. Other arguments: as in
    `quantize_operand`.
    """
    rule = scale_rule(scale_format, scale_rounding, granularity)
    options: dict[str, Any] = {"granularity": granularity, "block": block}
    x = torch.where(x.isfinite(), x, 0)
    largest = amax(x, dim=1, **options)
    if rule >= TWO_LEVEL:
        whole, scales = scales_of_both_levels(x, largest, constants, None, rule, dim=1, **options)
        scale = element_scale(whole, scales)
        at_limit = scales == scale_constants(constants)[SPACING]
    else:
        scale = scale_by_constants(measured(statistic, x, dim=1, **options), constants, rule)
        at_limit = (scale == LOWEST) | (scale == HIGHEST)
    filled, count = largest > 0, largest.numel()
    present = int(filled.sum())
    if not present:
        return BlockStatistics(0.0, 0.0, 1.0 if count else 0.0, 0.0, 0.0)
    beyond = (largest.double() - constants[MAX].double() / scale.double()).clamp(min=0)
    logarithms, outside = scale[filled].log2(), int(OUTER * present)
    lowest, highest = (logarithms.kthvalue(rank).values for rank in (1 + outside, present - outside))
    return BlockStatistics(
        saturated=overflows(largest.float() * scale, constants).sum().item() / count,
        clamped=(beyond.sum() / largest.double().sum()).item(),
        empty=(count - present) / count,
        at_limit=(at_limit & filled).sum().item() / present,
        spread=(highest - lowest).item(),
    )


# --- an optimizer's step ---------------------------------------------------------------------------------------------

LOWEST_BINADE, HIGHEST_BINADE = -16, 0  # of |w|; the two ends also count elements beyond


class UpdateSums(NamedTuple):
    """What one optimizer step did to the elements of a weight and to their quantized values.

    ``wanted``: number of elements that the step wanted to move; ``stalled``: number of these whose code stayed.
    ``flips``: codes that changed, apart from a shift by k binades where the scale became about 2^k times as large.
    ``descending``: flips that lower the loss to first order, g · Δ < 0 with Δ the change of the quantized value.
    ``gap``: sum of |wanted change − Δ| in ulp at the old weight. ``counts`` and ``rungs``: by binade of the old weight,
    from `LOWEST_BINADE` to `HIGHEST_BINADE`, the number of elements and the sum of |new − old| in ulp.
    """

    wanted: int
    stalled: int
    flips: int
    descending: int
    gap: float
    counts: list[int]
    rungs: list[float]


def update_sums(
    old: Tensor, new: Tensor, wanted: Tensor, grad: Tensor, before: Tensor, after: Tensor, constants: Tensor,
    refinement: int = 1,
) -> UpdateSums:  # fmt: skip
    """Return the `UpdateSums` of a step from ``old`` to ``new``.

    Args:
        old: weight before the step, float32 (n, k), finite; so are the next three.
        new: weight after the step.
        wanted: the weight that the step would give without rounding; ``new`` itself for master weights.
        grad: the gradient that the step was taken on.
        before: the scale at ``old``, float32, broadcastable.
        after: the scale at ``new``.
        constants: the format, from `format_constants` or `refined_constants`.
        refinement: steps of the grid of ``constants`` per ulp.
    """
    scaled = old * before
    held, now = _rounded(scaled, constants), _rounded(new * after, constants)
    moved = now / after - held / before
    ulp = grid_spacing(scaled, constants) * refinement / before
    meant, flipped = wanted != old, held * _nearest_power_of_two(after / before) != now
    gap = ((wanted - old) - moved).abs() / ulp
    rungs = (new - old).abs() / ulp
    down = grad.sign() * moved.sign() < 0
    kinds = (meant, meant & ~flipped, flipped, flipped & down)
    moves, stalls, flips, descending = (int(torch.count_nonzero(kind)) for kind in kinds)
    binade = torch.where(old == 0, LOWEST_BINADE, torch.frexp(old).exponent - 1)
    place = (binade.clamp(LOWEST_BINADE, HIGHEST_BINADE) - LOWEST_BINADE).flatten()
    size = HIGHEST_BINADE - LOWEST_BINADE + 1
    return UpdateSums(
        moves, stalls, flips, descending,
        gap.sum(dtype=torch.float64).item(),
        torch.bincount(place, minlength=size).tolist(),
        torch.bincount(place, weights=rungs.flatten().double(), minlength=size).tolist(),
    )  # fmt: skip


def _nearest_power_of_two(ratio: Tensor) -> Tensor:
    """Return the power of two nearest in log2: 1 from 1/sqrt(2) to sqrt(2). Positive float32, in and out."""
    return power_of_two(torch.frexp(ratio * 2**0.5).exponent.long() - 1).float()
