"""torch operators that make operands: on a CPU C++ loops (`cpu/kernels.cpp`), on a GPU Triton kernels (`gpu_launch`).

torch's dispatcher chooses by device. This module declares the operators, says what they return to the compiler, to
autograd and to vmap, and calls them. Arguments are numbers, tensors and lists of tensors alone: torch 2.13 leaks a
string or an optional tensor at each call of a stable operator. So granularity and block are one number, a `block_code`,
and optional tensors are lists: ``histories`` and ``streams`` are empty or have an entry per tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from altgrad.numerics import loops
from altgrad.numerics.constants import LEARNS, TWO_LEVEL, scale_constants
from altgrad.numerics.gpu_launch import quantize_on_gpu, takes_kernels
from altgrad.numerics.operand_definition import (
    FLOAT8,
    ONE_SCALE,
    PACKED,
    block_shape,
    decode_by_tensors,
    encode_by_tensors,
    filled_up,
    has_scale,
    packed_shape,
    quantize_by_tensors,
    scale_shape,
)
from altgrad.numerics.scaling import amax, scaling_amax

_HOW = "int first, bool newest, int learns, int block, int dim, int rule"
_ONE = f"Tensor constants, Tensor(c!)[] histories, Tensor[] streams, {_HOW}"
_EACH = f"Tensor[] constants, Tensor(c!)[] histories, Tensor[] streams, {_HOW}"
SCHEMAS = {
    "quantize_operand": "(Tensor x, Tensor constants, Tensor remembered, int block, int dim, int rule, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    "quantize_into": f"(Tensor x, Tensor(a!) values, {_ONE}) -> Tensor",
    "quantize_in_place": f"(Tensor(a!) values, {_ONE}) -> Tensor",
    "quantize_each_into": f"(Tensor[] xs, Tensor(a!)[] values, {_EACH}) -> Tensor",
    "rotate_and_quantize_into": f"(Tensor x, Tensor signs, Tensor(a!) values, Tensor(b!) blocks, {_ONE}) -> Tensor",
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
    torch.library.define(f"altgrad::{_name}", _schema)


def has_loops(t: Tensor) -> bool:
    """Whether C++ loops exist for the device of ``t``; builds and loads them the first time."""
    return t.device.type == "cpu" and loops.available()


def quantize_by_operators(
    xs: Sequence[Tensor], constants: Sequence[Tensor], histories: Sequence[Tensor], streams: Sequence[Tensor],
    *, method: str, learns: str, block: int, dim: int, rule: int, dtype: torch.dtype, first: int, overwrite: bool,
) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return (values, scale) of each tensor as `quantize_operands` does, with one operator call for all tensors.

    A GPU takes one tensor. Its history holds the amax that sets the scale, and is not updated.
    """
    if rule >= TWO_LEVEL:
        list(map(scale_constants, constants))  # raises where they are missing
    how = (histories, streams, first, method == "most-recent", LEARNS.index(learns), block, dim, rule)
    operators = torch.ops.altgrad
    if len(xs) > 1:
        each = [_new_values(x, dtype, dim) for x in xs]
        scales = operators.quantize_each_into(xs, each, constants, *how)
        shapes = [scale_shape(x, block, dim, rule) for x in xs]
        parts = scales.split([math.prod(shape) for shape in shapes])
        return [(values, part.view(shape)) for values, part, shape in zip(each, parts, shapes, strict=True)]
    (x,) = xs  # a tensor by itself takes 2 us less than a list of one
    if overwrite and x.dtype == dtype and x.is_contiguous():
        return [(x, operators.quantize_in_place(x, *constants, *how))]
    values = _new_values(x, dtype, dim)
    return [(values, operators.quantize_into(x, values, *constants, *how))]


def _new_values(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    # A product that sums over rows wants float8 by columns in memory.
    if dim == 0 and dtype in FLOAT8.values():
        return x.new_empty(x.shape[::-1], dtype=dtype).t()
    return x.new_empty(x.shape, dtype=dtype)


def quantize_by_operator(
    x: Tensor, constants: Tensor, known: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None = None, first: int = 0, overwrite: bool = False, signs: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the result of `quantize_by_tensors`, from an operator; ``known`` is the amax that sets the scale.

    On a GPU ``signs`` rotate ``x`` first; None: no rotation. There a positive ``known`` sets the scale even if the amax
    of ``x`` is not finite. ``overwrite``: as in `quantize_operands`.
    """
    amaxes, streams = ([] if t is None else [t] for t in (known, stream))
    if signs is None and dtype != PACKED:
        how: dict[str, Any] = {"block": block, "dim": dim, "rule": rule, "dtype": dtype, "first": first}
        how |= {"method": "most-recent", "learns": "nothing", "overwrite": overwrite}
        return quantize_by_operators([x], [constants], amaxes, streams, **how)[0]
    if rule >= TWO_LEVEL:
        scale_constants(constants)  # raises where they are missing
    n, k = x.shape if signs is None else (filled_up(x.shape[0], signs.shape[0]), x.shape[1])
    blocks = x.new_empty(block_shape(n, k, block, dim) if dtype == PACKED else 0, dtype=torch.uint8)
    if dtype == PACKED:
        rows, columns = packed_shape(n, k, dim)
        values = x.new_empty((rows, columns) if dim != 0 else (columns, rows), dtype=torch.uint8)
        values = values if dim != 0 else values.t()
    else:
        values = x.new_empty((n, k), dtype=dtype)
    signs = x.new_empty(0) if signs is None else signs
    scale = torch.ops.altgrad.rotate_and_quantize_into(
        x, signs, values, blocks, constants, amaxes, streams, first, False, 0, block, dim, rule
    )
    return (values, scale, blocks) if dtype == PACKED else (values, scale)


# --- what torch needs to know of operators ----------------------------------------------------------------------------


def _quantize_operand(
    x: Tensor, constants: Tensor, remembered: Tensor, block: int, dim: int, rule: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run ``quantize_operand`` on any device: by loops or kernels, else by the tensor operations that define it."""
    by_kernels = takes_kernels(x, dtype, block)
    if not (by_kernels or has_loops(x)):
        values, scale, *_ = quantize_by_tensors(x, constants, remembered, block, dim, rule, dtype)
        return values, scale
    if by_kernels and (block == ONE_SCALE or rule >= TWO_LEVEL):
        remembered = scaling_amax(remembered, amax(x))  # which loops do themselves
    values, scale, *_ = quantize_by_operator(x, constants, remembered, block, dim, rule, dtype)
    return values, scale


for _name, _function in (
    ("quantize_operand", _quantize_operand),
    ("encode_operand", encode_by_tensors),
    ("decode_operand", decode_by_tensors),
):
    torch.library.impl(f"altgrad::{_name}", "CompositeExplicitAutograd")(_function)
ON_GPU: dict[str, Callable[..., Tensor]] = {
    "quantize_into": lambda x, values, *rest: quantize_on_gpu(x, None, values, None, *rest),
    "quantize_in_place": lambda values, *rest: quantize_on_gpu(values, None, values, None, *rest),
    "rotate_and_quantize_into": quantize_on_gpu,
}
for _name, _on_gpu in ON_GPU.items():
    torch.library.impl(f"altgrad::{_name}", "CUDA")(_on_gpu)


def _new_scale(values: Tensor, block: int, dim: int, rule: int) -> Tensor:
    return values.new_empty(scale_shape(values, block, dim, rule, values.dtype), dtype=torch.float32)


def _new_scales(values: Sequence[Tensor], block: int, dim: int, rule: int) -> Tensor:
    count = sum(math.prod(scale_shape(t, block, dim, rule)) for t in values)
    return values[0].new_empty(count, dtype=torch.float32)


_RESULTS: dict[str, Callable[..., Any]] = {  # as the compiler sees them
    "quantize_operand": lambda x, constants, remembered, block, dim, rule, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(scale_shape(x, block, dim, rule, dtype), dtype=torch.float32),
    ),
    "quantize_into": lambda x, values, *rest: _new_scale(values, *rest[-3:]),
    "quantize_in_place": lambda values, *rest: _new_scale(values, *rest[-3:]),
    "quantize_each_into": lambda xs, values, *rest: _new_scales(values, *rest[-3:]),
    "rotate_and_quantize_into": lambda x, signs, values, *rest: _new_scale(values, *rest[-3:]),
    "ms_eden_into": lambda x, *rest: x.new_empty((), dtype=torch.float32),
    "rotated_ms_eden_into": lambda x, *rest: x.new_empty((), dtype=torch.float32),
    "rotate_rows": lambda x, signs: x.new_empty(
        (filled_up(x.shape[0], signs.shape[0]), x.shape[1]), dtype=torch.float32
    ),
    "random_signs": lambda stream, first, count: stream.new_empty(count, dtype=torch.float32),
    "encode_operand": lambda values, constants: values.new_empty(values.shape, dtype=torch.uint8),
    "decode_operand": lambda codes, constants, dtype: codes.new_empty(codes.shape, dtype=dtype),
}
for _name, _result in _RESULTS.items():
    torch.library.register_fake(f"altgrad::{_name}", _result)


def _keep_scale(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, _, _, block, _, rule, _ = inputs
    _, scale = output
    ctx.mark_non_differentiable(scale)
    ctx.unscaled, ctx.dtype = not has_scale(block, rule), x.dtype
    ctx.save_for_backward(scale)


def _straight_through(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    (scale,) = ctx.saved_tensors
    return (grad if ctx.unscaled else grad * scale).to(ctx.dtype), *(None,) * 6


torch.library.register_autograd("altgrad::quantize_operand", _straight_through, setup_context=_keep_scale)


def _one_by_one(name: str) -> Callable[..., tuple[Any, Any]]:
    """Return the ``vmap`` rule of operator ``name``: one call per element of the batch, each with its own scale."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        pairs = list(zip(arguments, in_dims, strict=True))
        operator = getattr(torch.ops.altgrad, name)
        each = [operator(*(a if d is None else a.select(d, i) for a, d in pairs)) for i in range(info.batch_size)]
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        return tuple(map(torch.stack, zip(*each, strict=True))), (0, 0)

    return rule


for _name in ("quantize_operand", "encode_operand", "decode_operand"):
    torch.library.register_vmap(f"altgrad::{_name}", _one_by_one(_name))
