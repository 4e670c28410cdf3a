"""A quantization grid as a line of integers: the real-valued extension of `rung`, and the way back.

With u the coordinate, ``du/dw`` is one over the spacing: a representable value has its rung for a coordinate,
and between two of them it grows linearly. Beyond the largest value it goes on with the spacing there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.numerics.constants import FLOAT32_MANTISSA, MAX, SPACING, ULPS
from altgrad.numerics.rounding import grid_spacing


def coordinate(x: Tensor, constants: Tensor) -> Tensor:
    """Return the place of each value on the quantization grid, signed, an integer where the value is representable.

    Args:
        x: float32, any shape.
        constants: the format, from `format_constants`.

    Returns:
        float32, the shape of ``x``: exact for representable values.
    """
    magnitude = x.abs()
    spacing = grid_spacing(torch.minimum(magnitude, constants[MAX]), constants)
    binades = (_exponent(spacing) - _exponent(constants[SPACING])).float()
    return torch.copysign(binades * _per_binade(constants) + magnitude / spacing, x)


def at_coordinate(u: Tensor, constants: Tensor) -> Tensor:
    """Return the value whose `coordinate` is ``u``: float32 in and out."""
    magnitude = u.abs()
    per_binade = _per_binade(constants)
    lowest = _exponent(constants[SPACING])
    highest = _exponent(grid_spacing(constants[MAX], constants))
    exponent = torch.minimum(((magnitude / per_binade).floor() - 1).clamp(0, 255).int() + lowest, highest)
    binades = (exponent - lowest).float()
    spacing = (exponent << FLOAT32_MANTISSA).view(torch.float32)
    return torch.copysign((magnitude - binades * per_binade) * spacing, u)


def _per_binade(constants: Tensor) -> Tensor:
    """2^M, the representable values per binade."""
    return 2.0**FLOAT32_MANTISSA / constants[ULPS]


def _exponent(power_of_two: Tensor) -> Tensor:
    """The biased exponent of a positive normal float32."""
    return power_of_two.view(torch.int32) >> FLOAT32_MANTISSA
