"""The quantized product by FP8 and FP4 hardware: `torch._scaled_mm` on E4M3 and E5M2, `scaled_mm` on blocks.

The operands are the same as in the emulated product, so the cast to an 8-bit dtype and the products of two values are
exact. The order of the sum differs, and the two scales are applied in float32, unusual scales up to a power of two
(`altgrad.model.quantized.operand`). `torch._scaled_mm` needs its first factor stored by rows, the second by columns,
and dimensions divisible by 16. So factors are stored that way and padded with zeros, which add nothing.

On a CPU torch emulates the operator, which is enough for tests. There a tensor's scale is expanded to one scale per
row. With one scale per tensor, torch 2.13 would call oneDNN if the processor has AMX. oneDNN's reference loop takes a
second for 256 x 256 x 256, and fails where ``ONEDNN_MAX_CPU_ISA`` forbids AMX.

**Blocks** along the sum (NATIVE.md lists them) have scales that hardware applies to the sums of the blocks' products.
Codes and scales equal the emulated product's wherever the emulated product rounds values over their scale to float32.
Scales are passed as float32 reciprocals. The product of two reciprocals, and its product with a sum, must stay in the
range of float32.

**NVFP4** (Blackwell) has codes of E2M1, two per byte, and blocks of 16 with scales in E4M3. A tile's scale is repeated
for each of its rows. Both tensors' scales are applied to the float32 sum before the sum is rounded.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from altgrad.common.errors import UserError
from altgrad.model.hardware import has_products
from altgrad.model.quantized.operand import Operand, factor_and_rest, multiplied
from altgrad.numerics.operand_definition import GROUP, PACKED

DIVISOR = 16
BLOCK = 128


def native_product(
    a: Operand, b: Operand, dtype: torch.dtype, no_autocast: AbstractContextManager[Any] | None = None
) -> Tensor:
    """Return ``a @ b / (scale_a scale_b)`` for ``a`` (n, k) and ``b`` (k, m), whose values are float8 or packed.

    Scales are 0-d, or (n, 1) and (1, m), or of blocks, as `quantize_operand` returns them. The result is bfloat16 for
    scales (n, 1) and for ``dtype`` bfloat16, else float32. ``no_autocast`` switches autocast off for a CPU's sum.
    """
    assert a.scale is not None and b.scale is not None
    rows, columns = a.values.shape[0], b.values.shape[1]
    if a.values.numel() == 0 or b.values.numel() == 0:
        return a.scale.new_zeros((rows, columns), dtype=dtype)
    # A result that unusual scales divide afterwards needs the range of float32 until then.
    wide = dtype if dtype == torch.bfloat16 else torch.float32
    if a.scale.ndim > 0 and (a.scale.shape, b.scale.shape) != ((rows, 1), (1, columns)):
        return _product_of_blocks(a, b.t(), [], wide)[:rows, :columns]
    (factor_a, rest_a), (factor_b, rest_b) = factor_and_rest(a.scale), factor_and_rest(b.scale)
    if a.blocks is not None:
        y = _product_of_blocks(a, b.t(), [factor_a, factor_b], wide)
        return multiplied(y[:rows, :columns], [], [rest_a, rest_b])
    left, right = _padded(a.values), _padded(b.values.t()).t()
    scale_a, scale_b = _scale_of_padded(factor_a, left.shape[0], 0), _scale_of_padded(factor_b, right.shape[1], 1)
    with no_autocast or nullcontext():
        y = torch._scaled_mm(
            left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=wide if a.scale.ndim == 0 else torch.bfloat16
        )
    return multiplied(y[:rows, :columns], [], [rest_a, rest_b])


def _padded(t: Tensor, divisor: int = DIVISOR) -> Tensor:
    """Return ``t`` stored by rows, with both dimensions padded with zeros to a multiple of ``divisor``."""
    below, beside = (-size % divisor for size in t.shape)
    if below or beside:
        # As bytes, since torch pads no float8; the byte 0 is the value 0.
        return pad(t.view(torch.uint8), (0, beside, 0, below)).view(t.dtype)
    return t.contiguous()


def _scale_of_padded(factor: Tensor, length: int, dim: int) -> Tensor:
    if factor.ndim == 0:
        shape = (length, 1) if dim == 0 else (1, length)
        return factor.expand(shape).contiguous() if factor.device.type == "cpu" else factor
    missing = length - factor.shape[dim]
    return pad(factor, (0, 0, 0, missing) if dim == 0 else (0, missing)).contiguous()


# --- blocks ---------------------------------------------------------------------------------------------------------


def _product_of_blocks(a: Operand, b: Operand, factors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return ``a @ b.T`` with its padding, for scales of blocks; times the ``factors`` of packed operands."""
    divisor = BLOCK if a.blocks is None else DIVISOR
    left, right = (_padded(t.values, divisor) for t in (a, b))
    (scale_a, recipe_a), (scale_b, recipe_b) = map(_laid_out, (a, b))
    recipes = recipe_a.value, recipe_b.value
    product: Tensor = torch.ops.altgrad.multiply_blocks(left, right.t(), scale_a, scale_b, *recipes, factors, dtype)
    return product


def _laid_out(t: Operand) -> tuple[Tensor, ScalingType]:
    """Return the reciprocal scales of ``t`` (n, k) in the layout that `scaled_mm` reads, and their `ScalingType`.

    Blocks of 128: (n, k / 128), stored by columns. Tiles: (k / 128, n / 128), stored by columns and padded to a
    multiple of 4. MXFP8 and NVFP4: codes of E8M0 and E4M3, in the order of `swizzled` (cuBLAS, "Scaling Factors
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
    """Return ``scales`` (n, blocks) as 1-d, one tile of 128 x 4 after the other; the last tiles are padded with zeros.

    Row 32 i + j of a tile stands at 16 j + 4 i.
    """
    n, blocks = scales.shape
    tiles = pad(scales, (0, -blocks % 4, 0, -n % 128)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _multiply_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, recipe_a: int, recipe_b: int, factors: list[Tensor],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return `scaled_mm` of arguments laid out for it, in ``dtype``; E8M0 and E4M3 scales are passed as uint8.

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
        scale_dtype = torch.float8_e4m3fn if factors else torch.float8_e8m0fnu
        scale_a, scale_b = scale_a.view(scale_dtype), scale_b.view(scale_dtype)
    swizzle = [SwizzleType.SWIZZLE_32_4_4 if swizzles else SwizzleType.NO_SWIZZLE]
    more = [ScalingType.TensorWise] if factors else []  # the second level
    swizzle += [SwizzleType.NO_SWIZZLE for _ in more]
    return scaled_mm(
        a, b, [scale_a, *factors[:1]], [ScalingType(recipe_a), *more], [scale_b, *factors[1:]],
        [ScalingType(recipe_b), *more], swizzle, swizzle, output_dtype=dtype,
    )  # fmt: skip


# Our own operator: torch 2.13 compiles `scaled_mm` to the operator of `torch._scaled_mm`, which needs other scales.
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
