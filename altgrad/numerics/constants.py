"""A format as one small tensor, which is how it enters a compiled graph.

`torch.compile` bakes Python numbers into the code that it generates, so numbers of a format would cost one compilation
per format. In a tensor they are data, and one compiled graph serves every format.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from altgrad.formats import SCALE_FORMATS, Format, get_format
from altgrad.formats.floats import FLOAT32_MANTISSA
from altgrad.numerics.compile_utils import constant_in_graphs

# Places in the packed tensor.
MAX, ULPS, SPACING, ANCHOR, ROOT, ZERO, TARGET = range(7)
SIZE = 7

NAN_CODE = 0x80  # 8-bit code of NaN in operands: the code of -0, which no product needs
LEARNS = ("nothing", "each", "first")  # which amax a history stores: none, each step's, the first step's
SCALE_RULES = ("float32", "floor", "ceil", "rceil", "even")  # float32: unrounded; the others round to a power of two
FLOAT32_RULE = SCALE_RULES.index("float32")
# Rules of block scales under a scale of the whole tensor: see `two_level`.
TWO_LEVEL, FOUR_OVER_SIX = len(SCALE_RULES), len(SCALE_RULES) + 1
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # Transformer Engine's and torchao's

# A float32 whose ulp is one, in the middle of its binade; it is even.
_EVEN_ANCHOR = 1.5 * 2.0**FLOAT32_MANTISSA
# The float32 square root of an odd power of two, squared in float32, is that power times 1 - 2^-24.
_PER_SHORTFALL = 2.0 ** (FLOAT32_MANTISSA + 1)


def format_constants(
    fmt: str | Format, device: torch.device | str | None = None, *, scale_format: str | Format = "float32"
) -> Tensor:
    """Return a format as one small tensor, which `round_to_grid` and `scale_from_amax` take.

    Args:
        fmt: a format or its name.
        device: device of the result.
        scale_format: the format of the scales. If it is neither float32 nor E8M0 (see `two_level`), the result holds
            its constants behind those of ``fmt``.

    Returns:
        float32, shape (7,), or (14,) with such a scale format. The largest value; float32 ulps per spacing in the
        normal range, 2^(23 - M); the smallest spacing; the anchor in spacings, and in squared roots of the spacing (see
        `rounding`); the zero that rounding adds at the end, -0 if the format has -0, else +0; the scaling target.

    Raises:
        ValueError: a format is unsigned or too wide for float32 arithmetic.
    """
    packed = packed_constants(get_format(fmt))
    if scale_format not in SCALE_FORMATS:
        packed += packed_constants(get_format(scale_format))
    return torch.tensor(packed, dtype=torch.float32, device=device)


def scale_constants(constants: Tensor) -> Tensor:
    """Return the constants of the scale's format, float32 (7,); ``ValueError`` if ``constants`` lack them."""
    if constants.numel() != 2 * SIZE:
        raise ValueError("constants: expected those of the scale's format too, from format_constants(scale_format=...)")
    return constants[SIZE:]


@constant_in_graphs
def packed_constants(fmt: Format) -> tuple[float, ...]:
    """Return the seven constants of ``fmt`` from `format_constants` as Python numbers."""
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
        # Codes are exponent fields, e + bias. Above an even code ties go down, so the anchor is odd there. With an odd
        # bias these are the odd e, where the shortfall adds a spacing. With an even bias they are the even e: every
        # anchor has one spacing more, and the shortfall takes it off at odd e.
        packed[ROOT] = -_PER_SHORTFALL if fmt.bias % 2 == 1 else _PER_SHORTFALL
        packed[ANCHOR] += (fmt.bias % 2 == 0) - packed[ROOT]
    packed[ZERO] = -0.0 if fmt.has_negative_zero else 0.0
    packed[TARGET] = fmt.scale_target
    return tuple(packed)


# --- a finer grid: the same range and scales, and a spacing that is a fraction of the format's -----------------------


@cache
def refined_format(fmt: Format, refinement: int) -> Format:
    """Return a format whose codes hold every value of the refined grid; ``fmt`` itself if ``refinement`` is 1.

    The refined grid has ``refinement - 1`` evenly spaced values between any two neighbours of ``fmt``. The returned
    format has log2(refinement) more mantissa bits and no special codes; it also has values above ``fmt.max``.

    Raises:
        ValueError: ``refinement`` is no power of two, or the result takes more than 16 bits.
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
    """Return `format_constants` of the refined grid: range and scaling target of ``fmt``, a finer spacing.

    Raises:
        ValueError: as `refined_format` and `format_constants`.
    """
    coarse = format_constants(fmt, device, scale_format=scale_format)
    if refinement == 1:
        return coarse
    constants = format_constants(refined_format(fmt, refinement), device, scale_format=scale_format)
    for place in (MAX, TARGET):
        constants[place] = coarse[place]
    return constants
