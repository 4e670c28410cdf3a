"""The operators of `operand`, for torch's dispatcher, compiler and autograd: on a CPU the loops of `kernels.cpp`, on a
GPU the kernels of `gpu.kernels`.

Numbers, tensors and lists of them alone: torch 2.13 leaks a string or an optional tensor at each call of a stable
operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from altgrad.numerics.constants import FLOAT32_RULE, LEARNS, TWO_LEVEL, scale_constants
from altgrad.numerics.cpu import kernels
from altgrad.numerics.gpu.launch import (
    quantize_in_place,
    quantize_into,
    quantize_packed_into,
    quantize_rotated_into,
    takes_kernels,
)
from altgrad.numerics.operand_definition import (
    FLOAT8,
    ONE_SCALE,
    PACKED,
    ROWS,
    block_shape,
    decode_by_tensors,
    encode_by_tensors,
    filled_up,
    has_scale,
    packed_shape,
    quantize_by_tensors,
    scale_shape,
)

NAMESPACE = "altgrad"

_REST = "Tensor(b!)[] histories, bool newest, int learns, int block, int dim, int rule"
_GROUPS = "Tensor constants, Tensor known, Tensor stream, int first, int block, int dim, int rule"
SCHEMAS = {
    "quantize_operand": "(Tensor x, Tensor constants, Tensor remembered, int block, int dim, int rule, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    "quantize_into": f"(Tensor x, Tensor(a!) values, Tensor constants, {_REST}) -> Tensor",
    "quantize_in_place": f"(Tensor(a!) values, Tensor constants, {_REST}) -> Tensor",
    "quantize_each_into": f"(Tensor[] xs, Tensor(a!)[] values, Tensor[] constants, {_REST}) -> Tensor",
    "quantize_groups_into": f"(Tensor x, Tensor(a!) values, {_GROUPS}) -> Tensor",
    "quantize_groups_in_place": f"(Tensor(a!) values, {_GROUPS}) -> Tensor",
    "quantize_rotated_into": f"(Tensor x, Tensor signs, Tensor(a!) values, {_GROUPS}) -> Tensor",
    "quantize_packed_into": f"(Tensor x, Tensor signs, Tensor(a!) values, Tensor(b!) blocks, {_GROUPS}) -> Tensor",
    "ms_eden_into": "(Tensor x, Tensor(a!) values, Tensor constants, Tensor stream, int first, int block, float clip, "
    "float room) -> Tensor",
    "rotated_ms_eden_into": "(Tensor x, Tensor over, Tensor signs, Tensor(a!) values, Tensor constants, Tensor stream, "
    "int first, int block) -> Tensor",
    "rotate_rows": "(Tensor x, Tensor signs) -> Tensor",
    "random_signs": "(Tensor stream, int first, int count) -> Tensor",
    "encode_operand": "(Tensor values, Tensor constants) -> Tensor",
    "decode_operand": "(Tensor codes, Tensor constants, ScalarType dtype) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"{NAMESPACE}::{_name}", _schema)


def has_loops(t: Tensor) -> bool:
    """Whether there are loops for where ``t`` lies, which this loads."""
    return t.device.type == "cpu" and kernels.available()


def needs_groups(block: int, rule: int, stochastic: bool = False) -> bool:
    """Whether these are the business of `quantize_groups_by_loops`, and not of `quantize_by_loops`."""
    return stochastic or rule >= TWO_LEVEL or block < ROWS or (block > 0 and rule == FLOAT32_RULE)


def quantize_by_loops(
    xs: Sequence[Tensor], constants: Sequence[Tensor], histories: Sequence[Tensor], method: str, learns: str,
    block: int, dim: int, rule: int, dtype: torch.dtype, overwrite: bool,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return what `quantize_operands` does, all in one call, by the loops; ``block`` is a `block_code`."""
    operators = torch.ops.altgrad
    options = (histories, method == "most-recent", LEARNS.index(learns), block, dim, rule)
    if len(xs) > 1:
        each = [torch.empty(x.shape, dtype=dtype) for x in xs]
        scales = operators.quantize_each_into(xs, each, constants, *options)
        return list(zip(each, _split(scales, xs, block, dim), strict=True))
    (x,) = xs  # by itself it takes 2 us less than in a list
    if overwrite and x.dtype == dtype and x.is_contiguous():
        return [(x, operators.quantize_in_place(x, *constants, *options))]
    values = torch.empty(x.shape, dtype=dtype)
    return [(values, operators.quantize_into(x, values, *constants, *options))]


def quantize_groups_by_loops(
    x: Tensor, constants: Tensor, known: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None, first: int, overwrite: bool, signs: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what `quantize_by_tensors` does for these arguments, by the loops or the kernels.

    These rotate ``x`` by ``signs``, if given, and store float8 by columns where the product sums over rows, as it wants
    them.
    """
    if rule >= TWO_LEVEL:
        scale_constants(constants)  # which must be there
    if known is None:  # for loops 0, which kernels would have to look at
        known = x.new_zeros((0,) if x.is_cuda else (), dtype=torch.float32)
    stream = x.new_empty(0, dtype=torch.int64) if stream is None else stream
    options = (constants, known, stream, first, block, dim, rule)
    n, k = x.shape if signs is None else (filled_up(x.shape[0], signs.shape[0]), x.shape[1])
    if dtype == PACKED:
        rows, columns = packed_shape(n, k, dim)
        values = x.new_empty((rows, columns) if dim != 0 else (columns, rows), dtype=torch.uint8)
        values = values if dim != 0 else values.t()
        blocks = x.new_empty(block_shape(n, k, block, dim), dtype=torch.uint8)
        signs = x.new_empty(0) if signs is None else signs
        return values, torch.ops.altgrad.quantize_packed_into(x, signs, values, blocks, *options), blocks
    if signs is not None:
        values = x.new_empty((n, k), dtype=dtype)
        return values, torch.ops.altgrad.quantize_rotated_into(x, signs, values, *options)
    if overwrite and x.dtype == dtype and x.is_contiguous():
        return x, torch.ops.altgrad.quantize_groups_in_place(x, *options)
    if dim == 0 and dtype in FLOAT8.values():
        values = x.new_empty(x.shape[::-1], dtype=dtype).t()
    else:
        values = x.new_empty(x.shape, dtype=dtype)
    return values, torch.ops.altgrad.quantize_groups_into(x, values, *options)


def _quantize(
    x: Tensor, constants: Tensor, remembered: Tensor, block: int, dim: int, rule: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    by_kernels = takes_kernels(x, dtype, block)
    if not (by_kernels or has_loops(x)):
        values, scale, *_ = quantize_by_tensors(x, constants, remembered, block, dim, rule, dtype)
        return values, scale
    if by_kernels or needs_groups(block, rule):
        values, scale, *_ = quantize_groups_by_loops(x, constants, remembered, block, dim, rule, dtype, None, 0, False)
        return values, scale
    history = [remembered.reshape(1)] if block == ONE_SCALE else []
    return quantize_by_loops([x], [constants], history, "max", "nothing", block, dim, rule, dtype, False)[0]


def _split(scales: Tensor, xs: Sequence[Tensor], block: int, dim: int) -> list[Tensor]:
    """Return each tensor's part of the scales of all, in its shape."""
    shapes = [scale_shape(x, block, dim) for x in xs]
    parts = scales.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


for _name, _function in (
    ("quantize_operand", _quantize),
    ("encode_operand", encode_by_tensors),
    ("decode_operand", decode_by_tensors),
):
    torch.library.impl(f"{NAMESPACE}::{_name}", "CompositeExplicitAutograd")(_function)
torch.library.impl(f"{NAMESPACE}::quantize_groups_into", "CUDA")(quantize_into)
torch.library.impl(f"{NAMESPACE}::quantize_groups_in_place", "CUDA")(quantize_in_place)
torch.library.impl(f"{NAMESPACE}::quantize_rotated_into", "CUDA")(quantize_rotated_into)
torch.library.impl(f"{NAMESPACE}::quantize_packed_into", "CUDA")(quantize_packed_into)


# --- what the compiler and autograd need to know ----------------------------------------------------


@torch.library.register_fake(f"{NAMESPACE}::quantize_operand")
def _(
    x: Tensor, constants: Tensor, remembered: Tensor, block: int, dim: int, rule: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = scale_shape(x, block, dim, rule, dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_into")
def _(
    x: Tensor, values: Tensor, constants: Tensor, histories: list[Tensor], newest: bool, learns: int,
    block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(scale_shape(x, block, dim), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_in_place")
def _(
    values: Tensor, constants: Tensor, histories: list[Tensor], newest: bool, learns: int,
    block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    return values.new_empty(scale_shape(values, block, dim), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_each_into")
def _(
    xs: list[Tensor], values: list[Tensor], constants: list[Tensor], histories: list[Tensor], newest: bool,
    learns: int, block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    count = sum(math.prod(scale_shape(x, block, dim)) for x in values)
    return values[0].new_empty(count, dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_groups_into")
def _(
    x: Tensor, values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int,
    block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(scale_shape(x, block, dim, rule, values.dtype), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_groups_in_place")
def _(
    values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int, block: int, dim: int, rule: int
) -> Tensor:
    return values.new_empty(scale_shape(values, block, dim, rule, values.dtype), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_rotated_into")
def _(
    x: Tensor, signs: Tensor, values: Tensor, constants: Tensor, known: Tensor, stream: Tensor, first: int,
    block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    return x.new_empty(scale_shape(values, block, dim, rule, values.dtype), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::quantize_packed_into")
def _(
    x: Tensor, signs: Tensor, values: Tensor, blocks: Tensor, constants: Tensor, known: Tensor, stream: Tensor,
    first: int, block: int, dim: int, rule: int,
) -> Tensor:  # fmt: skip
    return x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::rotated_ms_eden_into")
def _(
    x: Tensor, over: Tensor, signs: Tensor, values: Tensor, constants: Tensor, stream: Tensor, first: int, block: int
) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::ms_eden_into")
def _(
    x: Tensor, values: Tensor, constants: Tensor, stream: Tensor, first: int, block: int, clip: float, room: float
) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::rotate_rows")
def _(x: Tensor, signs: Tensor) -> Tensor:
    return x.new_empty((filled_up(x.shape[0], signs.shape[0]), x.shape[1]), dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::random_signs")
def _(stream: Tensor, first: int, count: int) -> Tensor:
    return stream.new_empty(count, dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::encode_operand")
def _(values: Tensor, constants: Tensor) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.uint8)


@torch.library.register_fake(f"{NAMESPACE}::decode_operand")
def _(codes: Tensor, constants: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, _, block, _, rule, _ = inputs
    _, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.unscaled, ctx.dtype = not has_scale(block, rule), x.dtype
    ctx.save_for_backward(scale)


def _straight_through(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    (scale,) = ctx.saved_tensors
    return (grad if ctx.unscaled else grad * scale).to(ctx.dtype), *(None,) * 6


torch.library.register_autograd(f"{NAMESPACE}::quantize_operand", _straight_through, setup_context=_keep_scale)


def _one_by_one(name: str) -> Callable[..., tuple[Any, Any]]:
    """Return the rule for ``vmap`` of an operator: one by one, each with an amax and a scale of its own."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        pairs = list(zip(arguments, in_dims, strict=True))
        operator = getattr(torch.ops.altgrad, name)
        each = [operator(*(a if d is None else a.select(d, i) for a, d in pairs)) for i in range(info.batch_size)]
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        return tuple(map(torch.stack, zip(*each, strict=True))), (0, 0)

    return rule


for _name in ("quantize_operand", "encode_operand", "decode_operand"):
    torch.library.register_vmap(f"{NAMESPACE}::{_name}", _one_by_one(_name))
