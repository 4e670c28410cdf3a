"""torch operators that make operands: on a CPU C++ loops (`cpu/kernels.cpp`), on a GPU Triton kernels (`gpu_launch`).

torch's dispatcher chooses by device. This module declares the operators, says what they return to the compiler,
and calls them. Arguments are numbers, tensors and lists of tensors alone: torch 2.13 leaks a
string or an optional tensor at each call of a stable operator. So granularity and block are one number, a `block_code`,
and optional tensors are lists: ``histories`` and ``streams`` are empty or have one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from altgrad.numerics import loops
from altgrad.numerics.constants import LEARNS, TWO_LEVEL, scale_constants, table_of
from altgrad.numerics.gpu_launch import quantize_on_gpu
from altgrad.numerics.operand_definition import (
    FLOAT8,
    PACKED,
    block_shape,
    decode_by_tensors,
    encode_by_tensors,
    filled_up,
    packed_shape,
    scale_shape,
)

_HOW = (
    "Tensor constants, Tensor(c!)[] histories, Tensor[] streams, int first, bool newest, int learns, int block, "
    "int dim, int rule"
)
SCHEMAS = {
    "quantize_into": f"(Tensor x, Tensor(a!) values, {_HOW}) -> Tensor",
    "quantize_in_place": f"(Tensor(a!) values, {_HOW}) -> Tensor",
    "rotate_and_quantize_into": f"(Tensor x, Tensor signs, Tensor(a!) values, Tensor(b!) blocks, {_HOW}) -> Tensor",
    "ms_eden_into": "(Tensor x, Tensor(a!) values, Tensor constants, Tensor stream, int first, int block, float clip, "
    "float room) -> Tensor",
    "rotated_ms_eden_into": "(Tensor x, Tensor over, Tensor signs, Tensor(a!) values, Tensor constants, Tensor stream, "
    "int first, int block) -> Tensor",
    "rotate_rows": "(Tensor x, Tensor signs) -> Tensor",
    "random_signs": "(Tensor stream, int first, int count) -> Tensor",
    "round_by_table": "(Tensor x, Tensor constants) -> Tensor",
    "encode_operand": "(Tensor values, Tensor constants) -> Tensor",
    "decode_operand": "(Tensor codes, Tensor constants, ScalarType dtype) -> Tensor",
}
for _name, _schema in SCHEMAS.items():
    torch.library.define(f"altgrad::{_name}", _schema)


def has_loops(t: Tensor, constants: Tensor | None = None) -> bool:
    """Whether C++ loops exist for the device of ``t``, and for the float format of ``constants``; they are built once.

    Of other formats, with a table, the loops have the rounding to nearest alone: see `loops_take`.
    """
    return t.device.type == "cpu" and (constants is None or table_of(constants) is None) and loops.available()


def quantize_by_operator(
    x: Tensor, constants: Tensor, history: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None = None, first: int = 0, overwrite: bool = False, signs: Tensor | None = None,
    method: str = "most-recent", learns: str = "nothing",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the result of `quantize_by_tensors`, from an operator.

    ``history`` sets the scale and ``overwrite`` chooses the place of the values, as in `quantize_operand`. On a GPU
    ``history`` is the amax that sets the scale, even if the amax of ``x`` is not finite, and is not updated. There
    ``signs`` rotate ``x`` first; None: no rotation.
    """
    if rule >= TWO_LEVEL:
        scale_constants(constants)  # raises where they are missing
    histories, streams = ([] if t is None else [t] for t in (history, stream))
    how = (histories, streams, first, method == "most-recent", LEARNS.index(learns), block, dim, rule)
    operators = torch.ops.altgrad
    if signs is None and dtype != PACKED:
        if overwrite and x.dtype == dtype and x.is_contiguous():
            return x, operators.quantize_in_place(x, constants, *how)
        # A product that sums over rows wants float8 by columns in memory.
        by_columns = dim == 0 and dtype in FLOAT8.values()
        values = x.new_empty(x.shape[::-1], dtype=dtype).t() if by_columns else x.new_empty(x.shape, dtype=dtype)
        return values, operators.quantize_into(x, values, constants, *how)
    n, k = x.shape if signs is None else (filled_up(x.shape[0], signs.shape[0]), x.shape[1])
    blocks = x.new_empty(block_shape(n, k, block, dim) if dtype == PACKED else 0, dtype=torch.uint8)
    if dtype == PACKED:
        rows, columns = packed_shape(n, k, dim)
        values = x.new_empty((rows, columns) if dim != 0 else (columns, rows), dtype=torch.uint8)
        values = values if dim != 0 else values.t()
    else:
        values = x.new_empty((n, k), dtype=dtype)
    signs = x.new_empty(0) if signs is None else signs
    scale = operators.rotate_and_quantize_into(x, signs, values, blocks, constants, *how)
    return (values, scale, blocks) if dtype == PACKED else (values, scale)


# --- what torch needs to know of operators ----------------------------------------------------------------------------


for _name, _function in (("encode_operand", encode_by_tensors), ("decode_operand", decode_by_tensors)):
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


_RESULTS: dict[str, Callable[..., Any]] = {  # as the compiler sees them
    "quantize_into": lambda x, values, *rest: _new_scale(values, *rest[-3:]),
    "quantize_in_place": lambda values, *rest: _new_scale(values, *rest[-3:]),
    "rotate_and_quantize_into": lambda x, signs, values, *rest: _new_scale(values, *rest[-3:]),
    "ms_eden_into": lambda x, *rest: x.new_empty((), dtype=torch.float32),
    "rotated_ms_eden_into": lambda x, *rest: x.new_empty((), dtype=torch.float32),
    "rotate_rows": lambda x, signs: x.new_empty(
        (filled_up(x.shape[0], signs.shape[0]), x.shape[1]), dtype=torch.float32
    ),
    "random_signs": lambda stream, first, count: stream.new_empty(count, dtype=torch.float32),
    "round_by_table": lambda x, constants: x.new_empty(x.shape),
    "encode_operand": lambda values, constants: values.new_empty(values.shape, dtype=torch.uint8),
    "decode_operand": lambda codes, constants, dtype: codes.new_empty(codes.shape, dtype=dtype),
}
for _name, _result in _RESULTS.items():
    torch.library.register_fake(f"altgrad::{_name}", _result)
