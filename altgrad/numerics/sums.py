"""What a tensor looks like and what rounding it does, in numbers: what the monitors of a training run are made of.

Counts are exact. Sums are of float64, whose order differs from device to device and from the loops that a CPU has of
its own (`cpu/sums.cpp`), so that their last digits do too. The tensor operations here define them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.cpu.sums import has_loops
from altgrad.numerics.rounding import overflows, round_to_grid


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

    How many lie beyond its largest value (``overflowed``), how many are no zeros and become zero (``vanished``), and
    the sum of squares of what rounding takes away (``lost``), in the tensor's own unit.
    """

    overflowed: int
    vanished: int
    lost: float


def magnitudes(x: Tensor) -> Magnitudes:
    """Return what `Magnitudes` says of ``x``, a float tensor of any shape."""
    found = torch.ops.altgrad.magnitudes(x) if has_loops(x) else magnitudes_by_tensors(x)
    amax, nonfinite, nonzero, squares = found.tolist()
    return Magnitudes(amax, int(nonfinite), int(nonzero), squares)


def rounding_sums(x: Tensor, constants: Tensor, scale: Tensor) -> RoundingSums:
    """Return what rounding ``x * scale`` does.

    Args:
        x: float (n, k).
        constants: the format, from `format_constants`.
        scale: float32: one, one per row (n, 1), or one per element.
    """
    by = torch.ops.altgrad.rounding_sums if has_loops(x) else rounding_sums_by_tensors
    overflowed, vanished, lost = by(x, constants, scale).tolist()
    # One scale is taken out of the sum; with several each element counts as large as it is.
    unit = scale.item() ** 2 if scale.numel() == 1 else 1.0
    return RoundingSums(int(overflowed), int(vanished), lost / unit)


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
    """Return the numbers of `RoundingSums`, float64; the last one scaled where there is one scale."""
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
