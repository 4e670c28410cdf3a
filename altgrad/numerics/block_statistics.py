"""What scales per block do to a tensor: blocks that saturate, that are empty, and scales at the end of their range."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.constants import MAX, SPACING, TWO_LEVEL, scale_constants
from altgrad.numerics.rounding import overflows
from altgrad.numerics.scaling import HIGHEST, LOWEST, amax, scale_by_constants, scale_rule
from altgrad.numerics.two_level import element_scale, scales_of_both_levels

OUTER = 0.01  # of the blocks, at either end, that a spread leaves out


class BlockStatistics(NamedTuple):
    """Shares of a tensor's blocks: with an element beyond the format's largest value (``saturated``), of zeros alone
    (``empty``), and of those that are not empty, whose scale is at its limit (``at_limit``).

    ``clamped``: the share of the sum of their largest magnitudes that is beyond the format's largest value. ``spread``:
    from p1 to p99 of log2 of the scales of blocks that are not empty, in binades; 0 without any.
    """

    saturated: float
    clamped: float
    empty: float
    at_limit: float
    spread: float


def block_statistics(
    x: Tensor, constants: Tensor, *, block: int, granularity: str = "block", scale_format: str = "E8M0",
    scale_rounding: str = "rceil",
) -> BlockStatistics:  # fmt: skip
    """Return the `BlockStatistics` of ``x`` (n, k), float, whose blocks lie along its rows.

    What is not finite counts as 0.

    The limits of a scale in E8M0 are 2^-126 and 2^127; of one in a format under a scale of the tensor, the format's
    smallest positive value: its largest is that of the largest block, always. The other arguments are those of
    `quantize_operands`.
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
        scale = scale_by_constants(largest, constants, rule)
        at_limit = (scale == LOWEST) | (scale == HIGHEST)
    filled, count = largest > 0, largest.numel()
    present = int(filled.sum())
    if not present:
        return BlockStatistics(0.0, 0.0, 1.0 if count else 0.0, 0.0, 0.0)
    beyond = (largest.double() - constants[MAX].double() / scale.double()).clamp(min=0)
    return BlockStatistics(
        saturated=overflows(largest.float() * scale, constants).sum().item() / count,
        clamped=(beyond.sum() / largest.double().sum()).item(),
        empty=(count - present) / count,
        at_limit=(at_limit & filled).sum().item() / present,
        spread=_spread(scale[filled].log2()),
    )


def _spread(values: Tensor) -> float:
    """The distance of the values that leave out `OUTER` of all at either end: order statistics, none in between."""
    n = len(values)
    outside = int(OUTER * n)
    return (values.kthvalue(n - outside).values - values.kthvalue(1 + outside).values).item()
