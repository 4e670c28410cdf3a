"""The quantized product by FP8 and FP4 hardware: ``torch._scaled_mm`` on E4M3 and E5M2, of blocks ``scaled_mm``.

The operands are those of the emulated product, so that a cast to an 8-bit dtype is exact, and so are the
products of two values; what differs is the order of the sum, and that the two scales are multiplied and
applied in float32, unusual ones but for a power of two (`unscaling`). On CPU torch emulates the operator,
which is enough to test against; scales of tensors are written out as those of rows there, since torch 2.13 leaves a
product with one scale to oneDNN where the processor has AMX: a reference loop, a second for 256 x 256 x 256, and an
error where ``ONEDNN_MAX_CPU_ISA`` forbids it.

The operator wants its first factor stored by rows, the second by columns, and every dimension divisible
by 16: factors are laid out so, and padded with zeros, which add nothing.

Blocks along the sum have scales that the hardware applies to the sums of their products: of 128, also of tiles of 128
in one of the factors (Hopper), or of 32 with scales in E8M0, which is MXFP8 (Blackwell). Where the emulated product
rounds each value over its scale to float32, codes and scales are the same and nothing is rounded. torch has these on
GPUs alone, for factors that are both E4M3. Scales are passed as what codes are multiplied with, in float32: their
products, and those of the sums, must stay inside its range.

NVFP4 (Blackwell) has codes of E2M1, two in a byte, and blocks of 16 whose scales are codes of E4M3. A tile's scale is
that of each of its rows. Both tensors' scales are applied to the float32 sum, which is rounded after that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from altgrad.common.errors import UserError
from altgrad.model.quantized.operand import Operand
from altgrad.model.quantized.unscaling import factor_and_rest, multiplied
from altgrad.numerics.operand_definition import GROUP, PACKED

DIVISOR = 16
BLOCK = 128
#: CUDA compute capabilities for which torch has products with such scales: the first, and the first without.
CAPABILITIES = {
    "one scale": ((8, 9), None), "rows": ((9, 0), None),
    "blocks of 128": ((9, 0), (10, 0)), "MXFP8": ((10, 0), None), "NVFP4": ((10, 0), None),
}  # fmt: skip


def has_products(scales: str, device: torch.device) -> bool:
    """Return whether ``device`` computes products with such ``scales``, a key of `CAPABILITIES`, by FP8 units."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    first, beyond = CAPABILITIES[scales]
    found = torch.cuda.get_device_capability(device)
    return found >= first and (beyond is None or found < beyond)


def native_product(
    a: Operand, b: Operand, dtype: torch.dtype, as_given: AbstractContextManager[Any] | None = None
) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)``; the values of ``a`` (n, k) and ``b`` (k, m) are float8, or packed.

    Scales are one each, and the result is in ``dtype``; or (n, 1) and (1, m), with which torch gives bfloat16 alone; or
    those of blocks, as `quantize_operands` has them. ``as_given`` switches autocast off, for the sum on a CPU.
    """
    assert a.scale is not None and b.scale is not None
    rows, columns = a.values.shape[0], b.values.shape[1]
    if a.values.numel() == 0 or b.values.numel() == 0:
        return a.scale.new_zeros((rows, columns), dtype=dtype)
    # What is divided by unusual scales afterwards needs the range of float32 until then.
    wide = dtype if dtype == torch.bfloat16 else torch.float32
    if a.scale.ndim > 0 and (a.scale.shape, b.scale.shape) != ((rows, 1), (1, columns)):
        return _product_of_blocks(a, b.t(), [], wide)[:rows, :columns]
    (factor_a, rest_a), (factor_b, rest_b) = factor_and_rest(a.scale), factor_and_rest(b.scale)
    if a.blocks is not None:
        y = _product_of_blocks(a, b.t(), [factor_a, factor_b], wide)
        return multiplied(y[:rows, :columns], [], [rest_a, rest_b])
    left, right = _padded(a.values), _padded(b.values.t()).t()
    scale_a, scale_b = _filled_up(factor_a, left.shape[0], 0), _filled_up(factor_b, right.shape[1], 1)
    with as_given or nullcontext():
        y = torch._scaled_mm(
            left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=wide if a.scale.ndim == 0 else torch.bfloat16
        )
    return multiplied(y[:rows, :columns], [], [rest_a, rest_b])


def _padded(t: Tensor, divisor: int = DIVISOR) -> Tensor:
    """Return ``t`` stored by rows, both dimensions filled up with zeros to a multiple of ``divisor``."""
    below, beside = (-size % divisor for size in t.shape)
    if below or beside:
        # As bytes, since torch pads no float8; the byte 0 is the value 0.
        return pad(t.view(torch.uint8), (0, beside, 0, below)).view(t.dtype)
    return t.contiguous()


def _filled_up(factor: Tensor, length: int, dim: int) -> Tensor:
    if factor.ndim == 0:
        shape = (length, 1) if dim == 0 else (1, length)
        return factor.expand(shape).contiguous() if factor.device.type == "cpu" else factor
    missing = length - factor.shape[dim]
    return pad(factor, (0, 0, 0, missing) if dim == 0 else (0, missing)).contiguous()


# --- blocks ---------------------------------------------------------------------------------------------------------


def _product_of_blocks(a: Operand, b: Operand, factors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the product along both factors' rows, with rows that fill it up; times the ``factors`` of packed ones."""
    divisor = BLOCK if a.blocks is None else DIVISOR
    left, right = (_padded(t.values, divisor) for t in (a, b))
    (scale_a, recipe_a), (scale_b, recipe_b) = map(_laid_out, (a, b))
    recipes = recipe_a.value, recipe_b.value
    product: Tensor = torch.ops.altgrad.multiply_blocks(left, right.t(), scale_a, scale_b, *recipes, factors, dtype)
    return product


def _laid_out(t: Operand) -> tuple[Tensor, ScalingType]:
    """Return what the codes of ``t`` (n, k), padded, are multiplied with, as the product reads it, and its kind.

    Blocks of 128 have (n, k / 128) stored by columns; tiles (k / 128, n / 128) stored so, with columns padded to a
    multiple of 4; of MXFP8 and NVFP4 the codes of E8M0 and E4M3, in the order of `swizzled` (cuBLAS, "Scaling Factors
    Layouts").
    """
    assert t.scale is not None
    n, k = t.values.shape
    if t.blocks is not None:
        each = t.blocks if len(t.blocks) == n else t.blocks.repeat_interleave(GROUP, dim=0)[:n]
        return swizzled(each), ScalingType.BlockWise1x16
    of_n, of_k = t.scale.shape
    if of_k != -(-k // BLOCK):
        exponents = 254 - (t.scale.contiguous().view(torch.int32) >> 23)  # of 1 / scale, biased
        return swizzled(exponents.to(torch.uint8)), ScalingType.BlockWise1x32
    reciprocals = t.scale.reciprocal()
    if of_n == n:
        return pad(reciprocals, (0, 0, 0, -n % BLOCK)).t().contiguous().t(), ScalingType.BlockWise1x128
    return pad(reciprocals, (0, -of_k % 4)).contiguous().t(), ScalingType.BlockWise128x128


def swizzled(scales: Tensor) -> Tensor:
    """Return ``scales`` (n, blocks) in 1-d: tile after tile of 128 x 4, that of row 32 i + j at 16 j + 4 i.

    What fills up the last tiles is zero.
    """
    n, blocks = scales.shape
    tiles = pad(scales, (0, -blocks % 4, 0, -n % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _multiply_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe_a: int, recipe_b: int, factors: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return what `scaled_mm` does of arguments laid out for it, in ``dtype``; scales in E8M0 and E4M3 are bytes.

    Raises:
        UserError: the device has no such products.
    """
    swizzles = scale_a.dtype == torch.uint8
    scales = "NVFP4" if factors else "MXFP8" if swizzles else "blocks of 128"
    if not has_products(scales, a.device):
        name = torch.cuda.get_device_name(a.device) if a.is_cuda else "a CPU"
        needed = "10.0 and above (Blackwell)" if swizzles else "9.0 (Hopper)"
        raise UserError(
            f"backend native multiplies {scales} on GPUs of compute capability {needed}, and this is {name}; "
            "take backend emulated"
        )
    if factors:
        a, b = a.view(PACKED), b.view(PACKED)
    if swizzles:
        own = torch.float8_e4m3fn if factors else torch.float8_e8m0fnu
        scale_a, scale_b = scale_a.view(own), scale_b.view(own)
    swizzle = [SwizzleType.SWIZZLE_32_4_4 if swizzles else SwizzleType.NO_SWIZZLE]
    more = []  # of the second level
    if factors:
        swizzle.append(SwizzleType.NO_SWIZZLE)
        more.append(ScalingType.TensorWise)
    return scaled_mm(
        a, b, [scale_a, *factors[:1]], [ScalingType(recipe_a), *more], [scale_b, *factors[1:]],
        [ScalingType(recipe_b), *more], swizzle, swizzle, output_dtype=dtype,
    )  # fmt: skip


# An operator of our own: torch 2.13 compiles `scaled_mm` to that of `torch._scaled_mm`, which wants other scales.
torch.library.define(
    "altgrad::multiply_blocks",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, int recipe_a, int recipe_b, Tensor[] factors, "
    "ScalarType dtype) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)
torch.library.impl("altgrad::multiply_blocks", "CompositeExplicitAutograd")(_multiply_blocks)


@torch.library.register_fake("altgrad::multiply_blocks")
def _(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe_a: int, recipe_b: int, factors: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
