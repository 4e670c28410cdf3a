"""A format as one small tensor, which is how it enters a compiled graph.

Python numbers are baked into what `torch.compile` generates, so a kernel that took a format's
numbers that way would be compiled anew for each format. Packed into a tensor they are data, and one
compiled graph serves every format.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from altgrad.numerics.formats import Format
from altgrad.numerics.registry import get_format

# Places in the packed tensor.
MAX, ULPS, SPACING, ANCHOR, ROOT, ZERO, TARGET = range(7)

NAN_CODE = 0x80  # of 8-bit codes in products: that of -0, which no product needs
LEARNS = ("nothing", "each", "first")  # what a history keeps of its tensor's amax

# Two operands scaled to the top of E6M1 or E7M0 would overflow the float32 accumulator of their
# matrix product, so a tensor's amax is scaled to 2^16 at most. Of the formats of up to 8 bits no other reaches
# beyond it: E5M2 ends at 57344, to which FP8 training brings its gradients.
TARGET_CAP = 2.0**16

FLOAT32_MANTISSA = 23
# The lowest binade in which 2^-24 of a value is a normal float32, which no mode flushes to zero.
_LOWEST_EXPONENT = -102

# A float32 whose ulp is one, in the middle of its binade; it is even.
_EVEN_ANCHOR = 1.5 * 2.0**FLOAT32_MANTISSA
# The float32 root of an odd power of two, squared in float32, is short of it by a factor 1 - 2^-24.
_PER_SHORTFALL = 2.0 ** (FLOAT32_MANTISSA + 1)


def scale_target(fmt: str | Format) -> float:
    """Return ``min(max, 2^16)``: the magnitude that a scaled tensor's amax is brought to."""
    return min(get_format(fmt).max, TARGET_CAP)


def has_float32_kernel(fmt: Format) -> bool:
    """Whether `round_to_grid` is exact for the format.

    It must be signed, its normal values must begin at 2^-102 or above, and 2^25 spacings of its top
    binade must not overflow. That is so for every signed format whose exponent has at most 7 bits and
    the usual bias.
    """
    top_spacing = fmt.emax - fmt.mantissa_bits
    return fmt.signed and fmt.emin >= _LOWEST_EXPONENT and top_spacing + FLOAT32_MANTISSA + 2 <= 127


def format_constants(fmt: str | Format, device: torch.device | str | None = None) -> Tensor:
    """Pack what `round_to_grid` and `scale_from_amax` need to know of a format.

    Args:
        fmt: a format or its name.
        device: where the tensor is to live.

    Returns:
        float32, shape (7,): the largest value; how many float32 ulps a spacing of the format is in the
        normal range, 2^(23 - M); the smallest spacing; the anchor in spacings, and in squared roots
        of the spacing (see `rounding`); the zero that is added at the end, -0 if the format keeps -0
        and +0 if not; the scaling target.

    Raises:
        ValueError: the format is unsigned or too wide for the kernel.
    """
    return torch.tensor(packed_constants(get_format(fmt)), device=device)


@torch.compiler.assume_constant_result
def packed_constants(fmt: Format) -> tuple[float, ...]:
    """`format_constants` as Python numbers."""
    return _packed(fmt)


@cache
def _packed(fmt: Format) -> tuple[float, ...]:
    if not has_float32_kernel(fmt):
        raise ValueError(f"fmt: {fmt} is not a signed format well inside float32's range")
    packed = [0.0] * 7
    packed[MAX] = fmt.max
    packed[ULPS] = 2.0 ** (FLOAT32_MANTISSA - fmt.mantissa_bits)
    packed[SPACING] = 2.0 ** (fmt.emin - fmt.mantissa_bits)
    packed[ANCHOR] = _EVEN_ANCHOR
    if fmt.mantissa_bits == 0:
        # Codes are exponent fields, e + bias: above an even one ties go down, so the anchor is odd, which
        # is for odd e if the bias is odd. One spacing more for a shortfall, or one more and it taken off.
        packed[ROOT] = -_PER_SHORTFALL if fmt.bias % 2 == 1 else _PER_SHORTFALL
        packed[ANCHOR] += (fmt.bias % 2 == 0) - packed[ROOT]
    packed[ZERO] = -0.0 if fmt.has_negative_zero else 0.0
    packed[TARGET] = scale_target(fmt)
    return tuple(packed)
