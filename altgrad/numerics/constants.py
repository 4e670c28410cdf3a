"""A format as one small tensor, which is how it enters a compiled graph.

Python numbers are baked into what `torch.compile` generates, so a kernel that took a format's
numbers that way would be compiled anew for each format. Packed into a tensor they are data, and one
compiled graph serves every format.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from altgrad.formats import SCALE_FORMATS, Format, get_format
from altgrad.formats.format import FLOAT32_MANTISSA
from altgrad.numerics.tracing import constant_in_graphs

# Places in the packed tensor.
MAX, ULPS, SPACING, ANCHOR, ROOT, ZERO, TARGET = range(7)
SIZE = 7

NAN_CODE = 0x80  # of 8-bit codes in products: that of -0, which no product needs
LEARNS = ("nothing", "each", "first")  # what a history keeps of its tensor's amax
SCALE_RULES = ("float32", "floor", "ceil", "rceil", "even")  # no rounding to a power of two, and the ways to do it
FLOAT32_RULE = SCALE_RULES.index("float32")
# In place of a rule, for scales of blocks under one of the tensor: see `two_level`.
TWO_LEVEL, FOUR_OVER_SIX = len(SCALE_RULES), len(SCALE_RULES) + 1
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # Transformer Engine's and torchao's

# A float32 whose ulp is one, in the middle of its binade; it is even.
_EVEN_ANCHOR = 1.5 * 2.0**FLOAT32_MANTISSA
# The float32 root of an odd power of two, squared in float32, is short of it by a factor 1 - 2^-24.
_PER_SHORTFALL = 2.0 ** (FLOAT32_MANTISSA + 1)


def format_constants(
    fmt: str | Format, device: torch.device | str | None = None, *, scale_format: str | Format = "float32"
) -> Tensor:
    """Pack what `round_to_grid` and `scale_from_amax` need to know of a format.

    Args:
        fmt: a format or its name.
        device: where the tensor is to live.
        scale_format: of the scales that the format goes with. Those of blocks may be in a format that has constants
            too (see `two_level`), which are put behind.

    Returns:
        float32, shape (7,), or (14,) with a scale's: the largest value; how many float32 ulps a spacing of the
        format is in the normal range, 2^(23 - M); the smallest spacing; the anchor in spacings, and in squared roots
        of the spacing (see `rounding`); the zero that is added at the end, -0 if the format keeps -0
        and +0 if not; the scaling target.

    Raises:
        ValueError: a format is unsigned or too wide for the kernel.
    """
    packed = packed_constants(get_format(fmt))
    if scale_format not in SCALE_FORMATS:
        packed += packed_constants(get_format(scale_format))
    return torch.tensor(packed, dtype=torch.float32, device=device)


def scale_constants(constants: Tensor) -> Tensor:
    """Return those of the scale's format, float32 (7,), from `format_constants` that has them; else ``ValueError``."""
    if constants.numel() != 2 * SIZE:
        raise ValueError("constants: expected those of the scale's format too, from format_constants(scale_format=...)")
    return constants[SIZE:]


@constant_in_graphs
def packed_constants(fmt: Format) -> tuple[float, ...]:
    """`format_constants` as Python numbers."""
    return _packed(fmt)


@cache
def _packed(fmt: Format) -> tuple[float, ...]:
    if not fmt.rounds_in_float32:
        raise ValueError(f"fmt: {fmt} is not a signed format well inside float32's range")
    packed = [0.0] * SIZE
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
    packed[TARGET] = fmt.scale_target
    return tuple(packed)
