"""A format as one small tensor, which is how it enters a compiled graph.

Python numbers are baked into what `torch.compile` generates, so a kernel that took a format's
numbers that way would be compiled anew for each format. Packed into a tensor they are data, and one
compiled graph serves every format. Floats travel as their float32 bit patterns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from altgrad.numerics.formats import Format
from altgrad.numerics.registry import get_format

# Places in the packed tensor. MAX, MIN_NORMAL, ANCHOR, ZERO and TARGET hold float32 bit patterns.
MAX, MIN_NORMAL, ANCHOR, ZERO, TARGET, SHIFT, HALF, KEEP, PARITY = range(9)

# Two operands scaled to the top of E6M1 or E7M0 would overflow the float32 accumulator of their
# matrix product, so a tensor's amax is scaled to 2^15 at most. No other format reaches beyond it.
TARGET_CAP = 2.0**15

FLOAT32_MANTISSA = 23
SIGN_BIT = -(1 << 31)


def scale_target(fmt: str | Format) -> float:
    """Return ``min(max, 2^15)``: the magnitude that a scaled tensor's amax is brought to."""
    return min(get_format(fmt).max, TARGET_CAP)


def has_float32_kernel(fmt: Format) -> bool:
    """Whether `round_to_grid` is exact for the format.

    It must be signed, within float32's range, no lower than float32's own subnormals reach, and its
    anchor (see `format_constants`) must not overflow.
    """
    spacing = fmt.emin - fmt.mantissa_bits
    return fmt.signed and fmt.emin >= -127 and -149 <= spacing <= 127 - FLOAT32_MANTISSA and fmt.emax <= 127


def format_constants(fmt: str | Format, device: torch.device | str | None = None) -> Tensor:
    """Pack what `round_to_grid` and `scale_from_amax` need to know of a format.

    Args:
        fmt: a format or its name.
        device: where the tensor is to live.

    Returns:
        int32, shape (9,): largest value; smallest normal value (+Inf without normals); anchor, which
        is 2^23 times the smallest spacing, so that adding and subtracting it rounds to that spacing;
        the zero that is added at the end, -0 if the format keeps -0 and +0 if not; the scaling
        target; 23 - M, the float32 mantissa bits to drop; half of the dropped unit, less one; the
        mask of kept bits; the adjustment of code parity.

    Raises:
        ValueError: the format is unsigned or not exact in float32.
    """
    return torch.tensor(_packed(get_format(fmt)), dtype=torch.int32, device=device)


@torch.compiler.assume_constant_result
def _packed(fmt: Format) -> list[int]:
    if not has_float32_kernel(fmt):
        raise ValueError(f"fmt: {fmt} is not a signed format within float32's range")
    shift = FLOAT32_MANTISSA - fmt.mantissa_bits
    # With M = 0 the code's parity is that of its exponent field, e + bias; float32's own is e + 127.
    parities_differ = fmt.mantissa_bits == 0 and fmt.bias % 2 == 0
    packed = [0] * 9
    packed[MAX] = _float32_bits(fmt.max)
    # Below 2^-126 float32 is linear itself, so there the anchor must do the rounding.
    packed[MIN_NORMAL] = _float32_bits(np.inf if fmt.min_normal is None else max(fmt.min_normal, 2.0**-126))
    packed[ANCHOR] = _float32_bits(2.0 ** (fmt.emin - fmt.mantissa_bits + FLOAT32_MANTISSA))
    packed[ZERO] = _float32_bits(-0.0 if fmt.has_negative_zero else 0.0)
    packed[TARGET] = _float32_bits(scale_target(fmt))
    packed[SHIFT] = shift
    packed[HALF] = (1 << (shift - 1)) - 1
    packed[KEEP] = -(1 << shift)
    packed[PARITY] = (1 << shift) if parities_differ else 0
    return packed


def _float32_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
