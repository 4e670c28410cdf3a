"""What a step of an optimizer did to a weight on its quantization grid, in numbers: what is recorded about updates.

Of each element there are the weight before and after the step, where the step wanted it, and the values that products
see of it: on the quantization grid, at the scale before and at the one after. The tensor operations here define the
numbers; a CPU has loops of its own for them (`cpu/sums.cpp`), which take one pass. Counts agree to the bit, sums are of
float64 in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.constants import MAX
from altgrad.numerics.cpu.sums import has_loops
from altgrad.numerics.rounding import grid_spacing, power_of_two, round_to_grid

LOWEST_BINADE, HIGHEST_BINADE = -16, 0  # of |w|; the ends take in what lies beyond


class UpdateSums(NamedTuple):
    """Of the elements of a weight, in one step.

    ``wanted``: how many the step wanted elsewhere; ``stalled``: those of them whose code stayed. ``flips``: how many
    codes changed, otherwise than all do where the scale goes to about 2^k times what it was; ``descending``: those of
    them that lower the loss to first order, g · Δ < 0 with Δ the change of the value on the quantization grid. ``gap``:
    the sum of |wanted change − Δ| in ulp at the old weight. ``counts`` and ``rungs``: by binade of the old weight, from
    `LOWEST_BINADE` to `HIGHEST_BINADE`, how many there are and the sum of |new − old| in ulp.
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
    """Return what `UpdateSums` says of a step from ``old`` to ``new``.

    Args:
        old: float32 (n, k), finite, as the next three.
        new: after the step.
        wanted: where the step would have gone without rounding; ``new`` itself for master weights.
        grad: the gradient that the step was taken on.
        before: the scale at ``old``, float32, broadcastable.
        after: that at ``new``.
        constants: the format, from `format_constants` or `refined_constants`.
        refinement: steps of the quantization grid of ``constants`` per ulp.
    """
    tensors = (old, new, wanted, grad)
    if all(has_loops(t) and t.dtype == torch.float32 for t in tensors):
        found = torch.ops.altgrad.update_sums(
            *tensors, _filled(before, old), _filled(after, old), constants, refinement, LOWEST_BINADE, HIGHEST_BINADE
        )
    else:
        found = update_sums_by_tensors(*tensors, before, after, constants, refinement)
    meant, stalled, flips, descending, gap, *binades = found.tolist()
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
    ulp = grid_spacing(torch.minimum(scaled.abs(), constants[MAX]), constants) * refinement / before
    meant, flipped = wanted != old, held * _nearest_power_of_two(after / before) != now
    gap = ((wanted - old) - moved).abs() / ulp
    rungs = (new - old).abs() / ulp
    found = (
        meant.sum(), (meant & ~flipped).sum(), flipped.sum(), (flipped & (grad.sign() * moved.sign() < 0)).sum(),
        gap.double().sum(),
    )  # fmt: skip
    binade = torch.where(old == 0, LOWEST_BINADE, torch.frexp(old).exponent.long() - 1)
    place = (binade.clamp(LOWEST_BINADE, HIGHEST_BINADE) - LOWEST_BINADE).flatten()
    size = HIGHEST_BINADE - LOWEST_BINADE + 1
    counts = torch.bincount(place, minlength=size).double()
    totals = torch.bincount(place, weights=rungs.flatten().double(), minlength=size)
    return torch.cat([torch.stack([number.double() for number in found]), counts, totals])


def _nearest_power_of_two(ratio: Tensor) -> Tensor:
    """In proportion: from 1/sqrt(2) to sqrt(2) it is 1. Positive float32, in and out."""
    return power_of_two(torch.frexp(ratio * 2**0.5).exponent.long() - 1).float()


def _filled(scale: Tensor, like: Tensor) -> Tensor:
    """One scale as it is, several as one for each element."""
    return scale if scale.numel() == 1 else scale.expand_as(like).contiguous()
