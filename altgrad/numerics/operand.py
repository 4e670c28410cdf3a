"""An operand of a quantized matrix product: a tensor on its format's grid, with the scales that brought it there.

`quantize_operands` is what a training step does with every weight, input and gradient. It is made of tensor
operations, which on a GPU the compiler fuses with their surroundings. On a CPU there are loops of our own
(`kernels`) behind operators: amax, scale and rounding take 0.06 ns per element together, where what
`torch.compile` makes of the tensor operations takes 0.3 for the rounding alone. It can overwrite its tensors, which
spares a second buffer, which would not be in the cache: in a step of `nano`, the head's gradient takes 0.6 ms
instead of 4.6. It takes several tensors at once, since a call costs as much as 50 thousand elements, and moves their
amax histories along, which would otherwise be small kernels by the dozen.

`encode_operand` and `decode_operand` keep an operand between the forward and the backward pass in one byte
per element: its rung and sign.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.constants import LEARNS, NAN_CODE, SPACING, TARGET, ULPS
from altgrad.numerics.cpu import kernels
from altgrad.numerics.rounding import round_to_grid
from altgrad.numerics.scaling import (
    amax,
    amax_from_history,
    broadcast_scale,
    scale_by_rule,
    scale_rule,
    update_amax_history,
)

NAMESPACE = "altgrad"
ONE_SCALE, ROWS = 0, -1  # in place of the number of elements per block

_REST = "Tensor(b!)[] histories, bool newest, int learns, int block, int dim, int rule"
SCHEMAS = {
    "quantize_operand": "(Tensor x, Tensor constants, Tensor remembered, int block, int dim, int rule, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    "quantize_into": f"(Tensor x, Tensor(a!) values, Tensor constants, {_REST}) -> Tensor",
    "quantize_in_place": f"(Tensor(a!) values, Tensor constants, {_REST}) -> Tensor",
    "quantize_each_into": f"(Tensor[] xs, Tensor(a!)[] values, Tensor[] constants, {_REST}) -> Tensor",
    "encode_operand": "(Tensor values, Tensor constants) -> Tensor",
    "decode_operand": "(Tensor codes, Tensor constants, ScalarType dtype) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema)


class Quantized(NamedTuple):
    """An operand of `quantize_operands`."""

    values: Tensor
    scale: Tensor | None


def quantize_operands(
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
    histories: Sequence[Tensor] = (),
    *,
    method: str = "max",
    learns: str = "nothing",
    granularity: str = "tensor",
    block: int = 32,
    dim: int = 1,
    scale_format: str = "float32",
    scale_rounding: str = "down",
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> list[Quantized]:
    """Return for each tensor ``round(x * scale)``, unscaled, and the scale, for a product that sums over ``dim``.

    No gradient flows; `quantize_operand` has one.

    Args:
        xs: each (n, k), float tensors of at most 32 bits.
        constants: their formats, from `format_constants`; ``dtype`` must hold their values.
        histories: float32 (length,) each, amax of earlier steps, the newest first and 0 for a step that has not
            been: they set the tensors' one scale, if not all 0. Empty: each tensor's own amax does.
        method: ``max`` or ``most-recent``, as in `amax_from_history`.
        learns: whether the histories, in place, take up the ``amax`` of their tensors: ``nothing``, that of ``each``
            step, or the ``first`` and no other.
        granularity: ``tensor``, ``row`` (a scale for each index outside the sum) or ``block`` (one per
            ``block`` neighbours along the sum; the scales are taken off again, so they should be ``E8M0``).
        block: elements per block.
        dim: 0 or 1.
        scale_format: ``float32``, or ``E8M0`` for powers of two.
        scale_rounding: of these, as in `compute_scale`.
        dtype: of the values.
        overwrite: have the values where ``x`` was, if it is the only one and has their dtype; without loops of our
            own, nothing changes.

    Returns:
        ``values`` (n, k) and ``scale`` float32: 0-d, (n, 1) or (1, k), None for blocks.
    """
    xs = [x.float() if x.dtype == torch.float16 else x for x in xs]
    block = _block_code(granularity, block)
    rule = scale_rule(scale_format, scale_rounding)
    if all(map(_has_loops, xs)):
        found = _quantize_by_loops(xs, constants, histories, method, learns, block, dim, rule, dtype, overwrite)
    else:
        found = []
        for i, x in enumerate(map(materialized, xs)):
            remembered = amax_from_history(histories[i], method) if histories else None
            found.append(_quantize_by_tensors(x, constants[i], remembered, block, dim, rule, dtype))
            if histories:
                _learn(histories[i], amax(x), learns)
    return [Quantized(values, None if block > 0 else scale) for values, scale in found]


def quantize_operand(
    x: Tensor,
    constants: Tensor,
    remembered: Tensor | None = None,
    *,
    granularity: str = "tensor",
    block: int = 32,
    dim: int = 1,
    scale_format: str = "float32",
    scale_rounding: str = "down",
    dtype: torch.dtype = torch.bfloat16,
) -> Quantized:
    """Return what `quantize_operands` makes of ``x`` (n, k), with a gradient.

    That is the gradient of ``x * scale`` with a constant scale: the straight-through estimator. ``remembered`` (0-d
    float32) is the amax that sets the tensor's one scale; that of ``x`` does where it is 0 or None.
    """
    if x.dtype == torch.float16:
        x = x.float()
    block = _block_code(granularity, block)
    remembered = x.new_zeros((), dtype=torch.float32) if remembered is None else remembered
    values, scale = torch.ops.altgrad.quantize_operand(
        x, constants, remembered, block, dim, scale_rule(scale_format, scale_rounding), dtype
    )
    return Quantized(values, None if block > 0 else scale)


def owned(x: Tensor) -> tuple[Tensor, bool]:
    """Return ``x`` for `quantize_operands` and whether that may overwrite it: in a compiled step, a copy.

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


# Operators take numbers, so that granularity and block are one there; it is said here what they mean.
def _block_code(granularity: str, block: int) -> int:
    """Return the elements per block, or `ONE_SCALE` or `ROWS`."""
    return {"tensor": ONE_SCALE, "row": ROWS}.get(granularity, block)


def _of_block_code(code: int) -> dict[str, Any]:
    """Return ``granularity`` and ``block`` of a `_block_code`, as arguments of `amax`."""
    return {"granularity": {ONE_SCALE: "tensor", ROWS: "row"}.get(code, "block"), "block": max(code, 1)}


def _has_loops(t: Tensor) -> bool:
    """Whether there are loops for where ``t`` lies, which this loads."""
    return t.device.type == "cpu" and kernels.available()


def _quantize_by_loops(
    xs: Sequence[Tensor], constants: Sequence[Tensor], histories: Sequence[Tensor], method: str, learns: str,
    block: int, dim: int, rule: int, dtype: torch.dtype, overwrite: bool,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    operators = torch.ops.altgrad
    options = (histories, method == "most-recent", LEARNS.index(learns), block, dim, rule)
    if len(xs) > 1:
        values = [torch.empty(x.shape, dtype=dtype) for x in xs]
        scales = operators.quantize_each_into(xs, values, constants, *options)
        return list(zip(values, _split(scales, xs, block, dim), strict=True))
    (x,) = xs  # by itself it takes 2 us less than in a list
    if overwrite and x.dtype == dtype and x.is_contiguous():
        return [(x, operators.quantize_in_place(x, *constants, *options))]
    values = torch.empty(x.shape, dtype=dtype)
    return [(values, operators.quantize_into(x, values, *constants, *options))]


def _quantize(
    x: Tensor, constants: Tensor, remembered: Tensor, block: int, dim: int, rule: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not _has_loops(x):
        return _quantize_by_tensors(x, constants, remembered, block, dim, rule, dtype)
    history = [remembered.reshape(1)] if block == ONE_SCALE else []
    return _quantize_by_loops([x], [constants], history, "max", "nothing", block, dim, rule, dtype, False)[0]


def _split(scales: Tensor, xs: Sequence[Tensor], block: int, dim: int) -> list[Tensor]:
    """Return each tensor's part of the scales of all, in its shape."""
    shapes = [_scale_shape(x, block, dim) for x in xs]
    parts = scales.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _scale_shape(x: Tensor, block: int, dim: int) -> tuple[int, ...]:
    of_rows = (x.shape[0], 1) if dim != 0 else (1, x.shape[1])
    return {ONE_SCALE: (), ROWS: of_rows}.get(block, (0,))


# --- from tensor operations ------------------------------------------------------------------------


def operand_scale(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, dim: int = 1,
    scale_format: str = "float32", scale_rounding: str = "down",
) -> Tensor:  # fmt: skip
    """Return the scale that `quantize_operand` takes, float32 and broadcastable to ``x``."""
    rule = scale_rule(scale_format, scale_rounding)
    return _operand_scale(x, constants, remembered, rule, granularity=granularity, block=block, dim=dim)


def _operand_scale(
    x: Tensor, constants: Tensor, remembered: Tensor | None, rule: int, *, granularity: str, block: int, dim: int
) -> Tensor:
    largest = amax(x, granularity, block=block, dim=dim)
    if granularity == "tensor" and remembered is not None:
        # Delayed scaling that began with scale 1 would send every gradient of the first step to zero.
        largest = torch.where(remembered > 0, remembered, largest)
    scale = scale_by_rule(largest.detach(), constants[TARGET].double(), rule)
    return broadcast_scale(scale, x.shape[dim], block=block, dim=dim) if granularity == "block" else scale


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
    x: Tensor, constants: Tensor, remembered: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    options = _of_block_code(block) | {"dim": dim}
    scale = materialized(_operand_scale(x, constants, remembered, rule, **options))
    values = round_to_grid(x.float() * scale, constants)
    if block > 0:
        return (values / scale).to(dtype), x.new_empty(0, dtype=torch.float32)
    return values.to(dtype), scale


def _learn(history: Tensor, largest: Tensor, learns: str) -> None:
    history = history.data  # a layer that is called twice learns in its second call's backward pass before its first's
    if learns == "each":
        history.copy_(update_amax_history(history, largest))
    elif learns == "first":
        history.copy_(torch.where(history == 0, largest, history))


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
def _(x, constants, remembered, block, dim, rule, dtype):  # noqa: ANN001, ANN202
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(_scale_shape(x, block, dim), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_into")
def _(x, values, constants, histories, newest, learns, block, dim, rule):  # noqa: ANN001, ANN202
    return x.new_empty(_scale_shape(x, block, dim), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_in_place")
def _(values, constants, histories, newest, learns, block, dim, rule):  # noqa: ANN001, ANN202
    return values.new_empty(_scale_shape(values, block, dim), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_each_into")
def _(xs, values, constants, histories, newest, learns, block, dim, rule):  # noqa: ANN001, ANN202
    count = sum(math.prod(_scale_shape(x, block, dim)) for x in values)
    return values[0].new_empty(count, dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::encode_operand")
def _(values, constants):  # noqa: ANN001, ANN202
    return values.new_empty(values.shape, dtype=torch.uint8)


@torch.library.register_fake(f"{NAMESPACE}::decode_operand")
def _(codes, constants, dtype):  # noqa: ANN001, ANN202
    return codes.new_empty(codes.shape, dtype=dtype)


def _keep_scale(ctx, inputs, output) -> None:  # noqa: ANN001
    x, _, _, block, *_ = inputs
    _, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.unscaled, ctx.dtype = block > 0, x.dtype
    ctx.save_for_backward(scale)


def _straight_through(ctx, grad, *_) -> tuple:  # noqa: ANN001, ANN002
    (scale,) = ctx.saved_tensors
    return (grad if ctx.unscaled else grad * scale).to(ctx.dtype), *(None,) * 6


torch.library.register_autograd(f"{NAMESPACE}::quantize_operand", _straight_through, setup_context=_keep_scale)
