"""A format's quantization grid with more rungs between its own.

Every value of the format stays, with ``refinement - 1`` evenly spaced ones between it and the next: the spacing at any
magnitude is the format's over ``refinement``. The range ends at the format's own largest value and scales bring a
tensor's amax to the format's own target, so that the binades of a tensor's weights are the same.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from altgrad.formats import Format
from altgrad.numerics.constants import MAX, TARGET, format_constants


@cache
def refined_format(fmt: Format, refinement: int) -> Format:
    """Return a format that has every value of the refined quantization grid, for its codes; ``fmt`` itself for 1.

    It has log2 of ``refinement`` more mantissa bits and no special codes: values above the largest of ``fmt`` too.

    Raises:
        ValueError: ``refinement`` is no power of two, or takes more than 16 bits.
    """
    if refinement == 1:
        return fmt
    if refinement < 1 or refinement & (refinement - 1):
        raise ValueError(f"refinement: expected a power of two, got {refinement}")
    bits = refinement.bit_length() - 1
    return Format(f"{fmt.name} refined {refinement} times", fmt.exponent_bits, fmt.mantissa_bits + bits, fmt.bias)


def refined_constants(
    fmt: Format, refinement: int, device: torch.device | str | None = None, *, scale_format: str = "float32"
) -> Tensor:
    """Return `format_constants` of the refined quantization grid.

    Raises:
        ValueError: as `refined_format` and `format_constants`.
    """
    own = format_constants(fmt, device, scale_format=scale_format)
    if refinement == 1:
        return own
    constants = format_constants(refined_format(fmt, refinement), device, scale_format=scale_format)
    for place in (MAX, TARGET):
        constants[place] = own[place]
    return constants
