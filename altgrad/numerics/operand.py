"""An operand of a quantized matrix product: a tensor on its format's grid, with the scales that brought it there.

`quantize_operand` is what a training step does with every weight, input and gradient. It is made of tensor
operations, which on a GPU the compiler fuses with their surroundings. On a CPU there are loops of our own
(`kernels`) behind two operators: amax, scale and rounding take 0.06 ns per element together, where what
`torch.compile` makes of the tensor operations takes 0.3 for the rounding alone. ``quantize_in_place`` spares a
second buffer, which would not be in the cache: in a step of `nano`, the head's gradient takes 0.6 ms instead of 4.6.

`encode_operand` and `decode_operand` keep an operand between the forward and the backward pass in one byte
per element: its rung and sign.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.numerics import kernels
from altgrad.numerics.constants import SPACING, ULPS
from altgrad.numerics.rounding import round_to_grid
from altgrad.numerics.scaling import amax, broadcast_scale, scale_from_amax

NAMESPACE = "altgrad"
NAN_CODE = 0x80  # that of -0, which no product needs
ONE_SCALE, ROWS = 0, -1  # in place of the number of elements per block

SCHEMAS = {
    "quantize_operand": "(Tensor x, Tensor constants, Tensor remembered, int block, int dim, bool pow2, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    "quantize_into": "(Tensor x, Tensor(a!) values, Tensor constants, Tensor remembered, int block, int dim, "
    "bool pow2) -> (Tensor, Tensor)",
    "quantize_in_place": "(Tensor(a!) values, Tensor constants, Tensor remembered, int block, int dim, bool pow2) "
    "-> (Tensor, Tensor)",
    "encode_operand": "(Tensor values, Tensor constants) -> Tensor",
    "decode_operand": "(Tensor codes, Tensor constants, ScalarType dtype) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema)


class Quantized(NamedTuple):
    """The result of `quantize_operand`."""

    values: Tensor
    scale: Tensor | None
    amax: Tensor | None


def quantize_operand(
    x: Tensor,
    constants: Tensor,
    remembered: Tensor | None = None,
    *,
    granularity: str = "tensor",
    block: int = 32,
    dim: int = 1,
    scale_dtype: str = "fp32",
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> Quantized:
    """Return ``round(x * scale)``, unscaled, and the scale, for a product that sums over ``dim``.

    The gradient is that of ``x * scale`` with a constant scale: the straight-through estimator.

    Args:
        x: (n, k), a float tensor of at most 32 bits.
        constants: the format, from `format_constants`; ``dtype`` must hold its values.
        remembered: 0-d float32, the amax that sets a tensor's one scale; that of ``x`` where it is 0 or None.
        granularity: ``tensor``, ``row`` (a scale for each index outside the sum) or ``block`` (one per
            ``block`` neighbours along the sum; the scales are taken off again, so they should be ``pow2``).
        block: elements per block.
        dim: 0 or 1.
        scale_dtype: ``fp32`` or ``pow2``.
        dtype: of the values.
        overwrite: have the values where ``x`` was, if that has their dtype; without loops of our own, nothing changes.

    Returns:
        ``values`` (n, k); ``scale`` float32: 0-d, (n, 1) or (1, k), None for blocks; ``amax`` of ``x``,
        0-d float32, None unless there is one scale.
    """
    if x.dtype == torch.float16:
        x = x.float()
    # kernels.cpp says why the operator takes numbers and no optional tensor: what has several elements is no amax.
    block = {"tensor": ONE_SCALE, "row": ROWS}.get(granularity, block)
    remembered = constants if remembered is None else remembered
    arguments = (x, constants, remembered, block, dim, scale_dtype == "pow2", dtype)
    # The operator with a gradient costs 8 us more per call, and no layer asks for one.
    if x.requires_grad:
        values, scale, largest = torch.ops.altgrad.quantize_operand(*arguments)
    else:
        values, scale, largest = _quantize(*arguments, overwrite)
    return Quantized(values, None if block > 0 else scale, largest if block == ONE_SCALE else None)


def owned(x: Tensor) -> tuple[Tensor, bool]:
    """Return ``x`` for `quantize_operand` and whether that may overwrite it: in a compiled step, a copy.

    It costs nothing where ``x`` is not read otherwise, since what makes ``x`` then writes the copy instead.
    """
    if not (torch.compiler.is_compiling() and _has_loops(x)):
        return x, False
    return x.clone(memory_format=torch.contiguous_format), True


def encode_operand(values: Tensor, constants: Tensor) -> Tensor:
    """Return one byte per value that lies on the grid of a format of at most 8 bits: uint8, the same shape.

    Bit 7 is the sign, the others are the magnitude of the rung. -0 becomes 0, whose sign no product shows
    but in the sign of a zero; its code stands for NaN, which not every format has.
    """
    encode = torch.ops.altgrad.encode_operand if _has_loops(values) else _encode
    return encode(values, constants)


def decode_operand(codes: Tensor, constants: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values that `encode_operand` was given."""
    decode = torch.ops.altgrad.decode_operand if _has_loops(codes) else _decode
    return decode(codes, constants, dtype)


def _has_loops(t: Tensor) -> bool:
    """Whether there are loops for where ``t`` lies, which this loads."""
    return t.device.type == "cpu" and kernels.available()


def _quantize(
    x: Tensor, constants: Tensor, remembered: Tensor, block: int, dim: int, pow2: bool, dtype: torch.dtype,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _has_loops(x):
        return _quantize_by_tensors(x, constants, remembered, block, dim, pow2, dtype)
    if overwrite and x.dtype == dtype and x.is_contiguous():
        return x, *torch.ops.altgrad.quantize_in_place(x, constants, remembered, block, dim, pow2)
    values = torch.empty(x.shape, dtype=dtype)
    return values, *torch.ops.altgrad.quantize_into(x, values, constants, remembered, block, dim, pow2)


# --- from tensor operations ------------------------------------------------------------------------


def operand_scale(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, dim: int = 1, scale_dtype: str = "fp32",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the scale that `quantize_operand` takes, float32 and broadcastable to ``x``, and a tensor's one amax."""
    largest = amax(x, granularity, block=block, dim=dim)
    if granularity == "tensor":
        # Delayed scaling that began with scale 1 would send every gradient of the first step to zero.
        chosen = largest if remembered is None else torch.where(remembered > 0, remembered, largest)
        return scale_from_amax(chosen, constants, dtype=scale_dtype), largest
    scale = scale_from_amax(largest, constants, dtype=scale_dtype)
    return broadcast_scale(scale, x.shape[dim], block=block, dim=dim) if granularity == "block" else scale, None


def materialized(t: Tensor) -> Tensor:
    """Have the compiler store ``t`` instead of computing it anew in each loop that reads it.

    Left alone, Inductor repeats what makes a tensor (a GELU, a softmax) in the loop that finds its amax
    and again in the loop that quantizes it, and repeats a scale's divisions for every vector of
    elements. The result is that of ``t`` either way; without a compiler nothing happens.
    """
    if not torch.compiler.is_compiling():
        return t
    from torch._inductor.inductor_prims import force_stride_order  # a second's import, and of no use in eager mode

    return force_stride_order(t, t.stride())


def _quantize_by_tensors(
    x: Tensor, constants: Tensor, remembered: Tensor, block: int, dim: int, pow2: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x = materialized(x)
    scale, largest = operand_scale(
        x, constants, remembered if remembered.numel() == 1 else None,
        granularity={ONE_SCALE: "tensor", ROWS: "row"}.get(block, "block"), block=max(block, 1), dim=dim,
        scale_dtype="pow2" if pow2 else "fp32",
    )  # fmt: skip
    scale = materialized(scale)
    values = round_to_grid(x.float() * scale, constants)
    nothing = x.new_empty(0, dtype=torch.float32)
    if block > 0:
        return (values / scale).to(dtype), nothing, nothing
    return values.to(dtype), scale, nothing if largest is None else largest


def _first_normal_code(constants: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far to shift float32 bits for a code, and what to take off: int32, 0-d."""
    shift = _exponent(constants[ULPS])  # 23 - M
    emin = _exponent(constants[SPACING]) + 23 - shift
    return shift, (emin + 126) << (23 - shift)


def _exponent(power_of_two: Tensor) -> Tensor:
    return (power_of_two.view(torch.int32) >> 23) - 127


def _encode(values: Tensor, constants: Tensor) -> Tensor:
    shift, offset = _first_normal_code(constants)
    magnitude = values.float().abs()
    normal = (magnitude.view(torch.int32) >> shift) - offset
    smallest = constants[SPACING]
    subnormal = (magnitude / smallest).nan_to_num().clamp(max=255.0).int()
    code = torch.where(magnitude < smallest * (1 << (23 - shift)), subnormal, normal)
    code = torch.where((values < 0) & (code > 0), code + 0x80, code)
    return torch.where(values.isnan(), NAN_CODE, code).to(torch.uint8)


def _decode(codes: Tensor, constants: Tensor, dtype: torch.dtype) -> Tensor:
    shift, offset = _first_normal_code(constants)
    code = codes.int()
    magnitude = code & 0x7F
    normal = ((magnitude + offset) << shift).view(torch.float32)
    value = torch.where(magnitude < (1 << (23 - shift)), magnitude.float() * constants[SPACING], normal)
    value = torch.where(code > NAN_CODE, -value, value)
    return torch.where(code == NAN_CODE, torch.nan, value).to(dtype)


for _name, _function in (("quantize_operand", _quantize), ("encode_operand", _encode), ("decode_operand", _decode)):
    torch.library.impl(f"{NAMESPACE}::{_name}", "CompositeExplicitAutograd")(_function)


# --- what the compiler and autograd need to know ----------------------------------------------------


@torch.library.register_fake(f"{NAMESPACE}::quantize_operand")
def _(x, constants, remembered, block, dim, pow2, dtype):  # noqa: ANN001, ANN202
    return x.new_empty(x.shape, dtype=dtype), *_scale_and_amax(x, block, dim)


@torch.library.register_fake(f"{NAMESPACE}::quantize_into")
def _(x, values, constants, remembered, block, dim, pow2):  # noqa: ANN001, ANN202
    return _scale_and_amax(x, block, dim)


@torch.library.register_fake(f"{NAMESPACE}::quantize_in_place")
def _(values, constants, remembered, block, dim, pow2):  # noqa: ANN001, ANN202
    return _scale_and_amax(values, block, dim)


def _scale_and_amax(x: Tensor, block: int, dim: int) -> tuple[Tensor, Tensor]:
    of_rows = (x.shape[0], 1) if dim != 0 else (1, x.shape[1])
    scale = x.new_empty({ONE_SCALE: (), ROWS: of_rows}.get(block, (0,)), dtype=torch.float32)
    return scale, x.new_empty(() if block == ONE_SCALE else (0,), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::encode_operand")
def _(values, constants):  # noqa: ANN001, ANN202
    return values.new_empty(values.shape, dtype=torch.uint8)


@torch.library.register_fake(f"{NAMESPACE}::decode_operand")
def _(codes, constants, dtype):  # noqa: ANN001, ANN202
    return codes.new_empty(codes.shape, dtype=dtype)


def _keep_scale(ctx, inputs, output) -> None:  # noqa: ANN001
    x, _, _, block, *_ = inputs
    _, scale, largest = output
    ctx.mark_non_differentiable(scale, largest)
    ctx.unscaled, ctx.dtype = block > 0, x.dtype
    ctx.save_for_backward(scale)


def _straight_through(ctx, grad, *_) -> tuple:  # noqa: ANN001
    (scale,) = ctx.saved_tensors
    return (grad if ctx.unscaled else grad * scale).to(ctx.dtype), *(None,) * 6


torch.library.register_autograd(f"{NAMESPACE}::quantize_operand", _straight_through, setup_context=_keep_scale)
