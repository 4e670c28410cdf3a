"""What a tensor looks like and what rounding it does, in numbers: what the monitors of a training run are made of.

Counts are exact. Sums are of float64, whose order differs from device to device and from the loops that a CPU has of
its own (`cpu/sums.cpp`), so that their last digits do too. The tensor operations here define them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.cpu.sums import has_loops
from altgrad.numerics.operand_definition import operand_scale
from altgrad.numerics.rounding import overflows, round_to_grid
from altgrad.numerics.scaling import scale_rule


class Magnitudes(NamedTuple):
    """Of the finite elements of a tensor: the largest magnitude, how many are no zeros, the sum of their squares.

    ``nonfinite``: how many elements are NaN or infinite.
    """

    amax: float
    nonfinite: int
    nonzero: int
    squares: float


class RoundingSums(NamedTuple):
    """What a format does to the finite elements of a tensor.

    ``scale``: the median of the tensor's scales. How many elements lie beyond the format's largest value
    (``overflowed``), how many are no zeros and become zero (``vanished``), and the sum of squares of what rounding
    takes away (``lost``), in the tensor's own unit.
    """

    scale: float
    overflowed: int
    vanished: int
    lost: float


def magnitudes(x: Tensor) -> Magnitudes:
    """Return what `Magnitudes` says of ``x``, a float tensor of any shape."""
    found = torch.ops.altgrad.magnitudes(x) if has_loops(x) else magnitudes_by_tensors(x)
    return _magnitudes(found.tolist())


def rounding_sums(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, scale_format: str = "float32", scale_rounding: str = "rceil",
) -> tuple[Magnitudes, RoundingSums]:  # fmt: skip
    """Return what ``x`` is, and what rounding it does, at the scales that it has without what is not finite.

    Args:
        x: float (n, k).
        constants: the format, from `format_constants`.
        remembered: the amax (0-d float32) that sets the one scale, as in `quantize_operand`.
        granularity, block, scale_format, scale_rounding: as in `quantize_operands`, along the rows.
    """
    if granularity == "tensor" and has_loops(x):
        known, rule = constants[:0] if remembered is None else remembered, scale_rule(scale_format, scale_rounding)
        found = torch.ops.altgrad.one_scale_sums(x, constants, known, rule).tolist()
        return _magnitudes(found[:4]), _rounding(found[4], 1, found[5:])
    scale = operand_scale(
        torch.where(x.isfinite(), x, 0), constants, remembered,
        granularity=granularity, block=block, scale_format=scale_format, scale_rounding=scale_rounding,
    )  # fmt: skip
    by = torch.ops.altgrad.rounding_sums if has_loops(x) else rounding_sums_by_tensors
    return magnitudes(x), _rounding(scale.median().item(), scale.numel(), by(x, constants, scale).tolist())


def _magnitudes(found: list[float]) -> Magnitudes:
    amax, nonfinite, nonzero, squares = found
    return Magnitudes(amax, int(nonfinite), int(nonzero), squares)


def _rounding(scale: float, count: int, found: list[float]) -> RoundingSums:
    overflowed, vanished, lost = found
    # One scale is taken out of the sum; with several each element counts as large as it is.
    return RoundingSums(scale, int(overflowed), int(vanished), lost / scale**2 if count == 1 else lost)


def excess_kurtosis(x: Tensor) -> float:
    """Return the excess kurtosis of all elements of ``x``: 0 for a normal distribution, -2 at least."""
    by = torch.ops.altgrad.central_moments if has_loops(x) else central_moments_by_tensors
    variance, fourth = by(x).tolist()
    return fourth / variance**2 - 3 if variance > 0 else 0.0


# --- what defines them ------------------------------------------------------------------------------


def magnitudes_by_tensors(x: Tensor) -> Tensor:
    """Return the numbers of `Magnitudes`, float64."""
    finite = x.isfinite()
    x = torch.where(finite, x.float(), 0.0)
    largest = x.abs().amax() if x.numel() else x.sum()
    found = largest, (~finite).sum(), torch.count_nonzero(x), _squares(x)
    return torch.stack([number.double() for number in found])


def rounding_sums_by_tensors(x: Tensor, constants: Tensor, scale: Tensor) -> Tensor:
    """Return the counts and the sum of `RoundingSums`, float64, of ``x * scale``.

    ``scale`` is one, one per row (n, 1) or one per element; where it is one, the sum is scaled.
    """
    x = torch.where(x.isfinite(), x.float(), 0.0)
    scaled = x * scale
    rounded = round_to_grid(scaled, constants)
    lost = scaled - rounded
    found = (
        overflows(scaled, constants).sum(),
        torch.count_nonzero(x) - torch.count_nonzero(rounded),
        _squares(lost if scale.numel() == 1 else lost / scale),
    )
    return torch.stack([number.double() for number in found])


def central_moments_by_tensors(x: Tensor) -> Tensor:
    """Return the second and the fourth central moment, float64 (2,)."""
    x = x.double()
    squares = (x - x.mean()).square()
    return torch.stack([squares.mean(), squares.square().mean()])


def _squares(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()
