"""Numbers that monitors record about a tensor: its magnitudes, what rounding does to it, its blocks, an optimizer step.

The functions ending in ``_by_tensors`` define them. A CPU has C++ loops (`cpu/sums.cpp`) that take one pass. Counts are
exact everywhere. Sums are float64 in an order that depends on the device, so their last digits do too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.numerics import loops, rounding
from altgrad.numerics.constants import MAX, SPACING, TWO_LEVEL, scale_constants, table_of
from altgrad.numerics.operand_definition import operand_scale
from altgrad.numerics.rounding import grid_spacing, overflows, power_of_two, round_to_grid
from altgrad.numerics.scaling import HIGHEST, LOWEST, amax, measured, scale_by_constants, scale_rule
from altgrad.numerics.two_level import element_scale, scales_of_both_levels

SOURCE = Path(__file__).with_name("cpu") / "sums.cpp"
DEFINITIONS = loops.of_module("rounding", rounding, "OVERFLOW_SLACK")
SCHEMAS = {
    "magnitudes": "(Tensor x) -> Tensor",
    "rounding_sums": "(Tensor x, Tensor constants, Tensor scale) -> Tensor",
    "one_scale_sums": "(Tensor x, Tensor constants, Tensor remembered, int rule) -> Tensor",
    "central_moments": "(Tensor x) -> Tensor",
    "update_sums": "(Tensor old, Tensor now, Tensor wanted, Tensor grad, Tensor before, Tensor after, "
    "Tensor constants, int refinement, int lowest, int highest) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"altgrad::{_name}", _schema)


def has_loops(x: Tensor, constants: Tensor | None = None) -> bool:
    """Whether the C++ loops take ``x`` and the format of ``constants``; builds and loads them the first time."""
    kind = x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)
    kind = kind and (constants is None or table_of(constants) is None)
    return kind and loops.load(SOURCE, definitions=DEFINITIONS) is None


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
    return _magnitudes((torch.ops.altgrad.magnitudes if has_loops(x) else magnitudes_by_tensors)(x).tolist())


def rounding_sums(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, scale_format: str = "float32", scale_rounding: str = "rceil",
    statistic: str = "amax",
) -> tuple[Magnitudes, RoundingSums]:  # fmt: skip
    """Return the `Magnitudes` and `RoundingSums` of ``x``. Elements that are not finite do not affect the scales.

    Args:
        x: float (n, k).
        constants: the format, from `format_constants`.
        remembered: the amax (0-d float32) that sets the one scale, as in `quantize_operand`.
        granularity, block, scale_format, scale_rounding: as in `quantize_operand`, with ``dim`` 1.
    """
    if granularity == "tensor" and statistic == "amax" and has_loops(x, constants):
        known, rule = constants[:0] if remembered is None else remembered, scale_rule(scale_format, scale_rounding)
        numbers = torch.ops.altgrad.one_scale_sums(x, constants, known, rule).tolist()
        return _magnitudes(numbers[:4]), _rounding(numbers[4], 1, numbers[5:])
    scale = operand_scale(
        torch.where(x.isfinite(), x, 0), constants, remembered,
        granularity=granularity, block=block, scale_format=scale_format, scale_rounding=scale_rounding,
        statistic=statistic,
    )  # fmt: skip
    by = torch.ops.altgrad.rounding_sums if has_loops(x, constants) else rounding_sums_by_tensors
    return magnitudes(x), _rounding(scale.median().item(), scale.numel(), by(x, constants, scale).tolist())


def _magnitudes(numbers: list[float]) -> Magnitudes:
    amax, nonfinite, nonzero, squares = numbers
    return Magnitudes(amax, int(nonfinite), int(nonzero), squares)


def _rounding(scale: float, count: int, numbers: list[float]) -> RoundingSums:
    overflowed, vanished, lost = numbers
    # The sum is of scaled errors if there is one scale, and of errors in the tensor's unit if there are several.
    return RoundingSums(scale, int(overflowed), int(vanished), lost / scale**2 if count == 1 else lost)


def excess_kurtosis(x: Tensor) -> float:
    """Return the excess kurtosis of all elements of ``x``: 0 for a normal distribution, -2 at least."""
    by = torch.ops.altgrad.central_moments if has_loops(x) else central_moments_by_tensors
    variance, fourth = by(x).tolist()
    return fourth / variance**2 - 3 if variance > 0 else 0.0


def magnitudes_by_tensors(x: Tensor) -> Tensor:
    """Return the numbers of `Magnitudes`, float64 (4,)."""
    finite = x.isfinite()
    x = torch.where(finite, x.float(), 0.0)
    largest = x.abs().amax() if x.numel() else x.sum()
    return _stacked(largest, (~finite).sum(), torch.count_nonzero(x), _squares(x))


def rounding_sums_by_tensors(x: Tensor, constants: Tensor, scale: Tensor) -> Tensor:
    """Return the counts and the sum of `RoundingSums`, float64 (3,).

    ``scale``: a number, one per row (n, 1) or one per element. If a number, errors are not divided by it.
    """
    x = torch.where(x.isfinite(), x.float(), 0.0)
    scaled = x * scale
    rounded = round_to_grid(scaled, constants)
    lost = scaled - rounded
    return _stacked(
        overflows(scaled, constants).sum(),
        torch.count_nonzero(x) - torch.count_nonzero(rounded),
        _squares(lost if scale.numel() == 1 else lost / scale),
    )


def central_moments_by_tensors(x: Tensor) -> Tensor:
    """Return the second and the fourth central moment of the elements of ``x``, float64 (2,)."""
    x = x.double()
    squares = (x - x.mean()).square()
    return torch.stack([squares.mean(), squares.square().mean()])


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


def _stacked(*numbers: Tensor) -> Tensor:
    return torch.stack([number.double() for number in numbers])


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
    tensors = (old, new, wanted, grad)
    if all(has_loops(t, constants) and t.dtype == torch.float32 for t in tensors):
        each = [t if t.numel() == 1 else t.expand_as(old).contiguous() for t in (before, after)]
        ends = (LOWEST_BINADE, HIGHEST_BINADE)
        numbers = torch.ops.altgrad.update_sums(*tensors, *each, constants, refinement, *ends)
    else:
        numbers = update_sums_by_tensors(*tensors, before, after, constants, refinement)
    meant, stalled, flips, descending, gap, *binades = numbers.tolist()
    counts, rungs = binades[: len(binades) // 2], binades[len(binades) // 2 :]
    return UpdateSums(int(meant), int(stalled), int(flips), int(descending), gap, [int(n) for n in counts], rungs)


def update_sums_by_tensors(
    old: Tensor, new: Tensor, wanted: Tensor, grad: Tensor, before: Tensor, after: Tensor, constants: Tensor,
    refinement: int,
) -> Tensor:  # fmt: skip
    """Return the numbers of `UpdateSums` in their order, float64."""
    scaled = old * before
    held, now = round_to_grid(scaled, constants), round_to_grid(new * after, constants)
    moved = now / after - held / before
    ulp = grid_spacing(scaled, constants) * refinement / before
    meant, flipped = wanted != old, held * _nearest_power_of_two(after / before) != now
    gap = ((wanted - old) - moved).abs() / ulp
    rungs = (new - old).abs() / ulp
    down = grad.sign() * moved.sign() < 0
    first = _stacked(
        meant.sum(), (meant & ~flipped).sum(), flipped.sum(), (flipped & down).sum(), gap.double().sum()
    )  # fmt: skip
    binade = torch.where(old == 0, LOWEST_BINADE, torch.frexp(old).exponent.long() - 1)
    place = (binade.clamp(LOWEST_BINADE, HIGHEST_BINADE) - LOWEST_BINADE).flatten()
    size = HIGHEST_BINADE - LOWEST_BINADE + 1
    counts = torch.bincount(place, minlength=size).double()
    totals = torch.bincount(place, weights=rungs.flatten().double(), minlength=size)
    return torch.cat([first, counts, totals])


def _nearest_power_of_two(ratio: Tensor) -> Tensor:
    """Return the power of two nearest in log2: 1 from 1/sqrt(2) to sqrt(2). Positive float32, in and out."""
    return power_of_two(torch.frexp(ratio * 2**0.5).exponent.long() - 1).float()
