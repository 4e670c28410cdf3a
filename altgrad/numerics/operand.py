"""Operands of quantized matrix products: tensors rounded to a format under scales.

`quantize_operand` is what a training step does with every weight, input and gradient. `operand_definition` defines it
in tensor operations. A GPU has Triton kernels that do the same in one pass or two (`gpu_launch`). A CPU has C++ loops:
amax, scale and rounding together take 0.06 ns per element, where compiled tensor operations take 0.3 ns for rounding
alone. Loops can overwrite their input, so no second buffer needs the cache: in a step of `nano`, the head's gradient
takes 0.6 ms instead of 4.6. Loops also update amax histories, which would otherwise take dozens of small kernels.

`encode_operand` and `decode_operand` keep an operand between the forward and the backward pass in one byte per element.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.numerics import loops
from altgrad.numerics.compile_utils import converted, materialized
from altgrad.numerics.constants import HADAMARD_SIGNS, LEARNS, TWO_LEVEL, loops_take, scale_constants, table_of
from altgrad.numerics.gpu_launch import quantize_on_gpu, takes_kernels
from altgrad.numerics.operand_definition import (
    FLOAT8,
    ONE_SCALE,
    PACKED,
    ROWS,
    block_code,
    block_shape,
    decode_by_tensors,
    encode_by_tensors,
    filled_up,
    has_codes,
    has_scale,
    learn,
    packed_shape,
    quantize_by_tensors,
    rotate_by_tensors,
    scale_shape,
)
from altgrad.numerics.scaling import amax, amax_from_history, rms, scale_rule, scaling_amax


class Quantized(NamedTuple):
    """An operand: ``values`` still contain the factor ``scale``; None if they are in the unit of the tensor."""

    values: Tensor
    scale: Tensor | None


class Packed(NamedTuple):
    """An operand in float4_e2m1fn_x2: packed codes, the scale of the tensor, and the codes of the block scales."""

    values: Tensor
    scale: Tensor
    blocks: Tensor


def quantize_operand(
    x: Tensor,
    constants: Tensor,
    history: Tensor | None = None,
    stream: Tensor | None = None,
    *,
    method: str = "max",
    learns: str = "nothing",
    granularity: str = "tensor",
    block: int = 32,
    dim: int = 1,
    scale_format: str = "float32",
    scale_rounding: str = "rceil",
    statistic: str = "amax",
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    first: int = 0,
    in_memory: bool = False,
    rotate: bool = False,
) -> Quantized | Packed:
    """Quantize a tensor for a matrix product that sums over ``dim``: return ``round(x * scale)`` and ``scale``.

    No gradient flows; `quantize` with `operand_scale` has a gradient.

    Args:
        x: float (n, k); float64 is rounded to float32 first.
        constants: the format, from `format_constants`; ``dtype`` must hold its values.
        history: amax of earlier steps, float32 (length, ...), newest first, 0 for a step that has not happened. It
            sets the one scale of the tensor, the tensor's scale of two levels, or the scales of rows (entries shaped as
            `amax` returns them). The tensor's own amax sets the scale if the history is all 0 or None. An own amax of
            Inf or NaN always does, which makes all values NaN.
        stream: random numbers, int64 (3,), as `uniform` takes them, for stochastic rounding. None: values are
            rounded to nearest even.
        method: ``max`` or ``most-recent``, as in `amax_from_history`.
        learns: which amax of its tensor a history stores, in place: ``nothing``, the one of ``each`` step, or only the
            ``first``. A history never stores Inf or NaN. Only for a tensor with one scale.
        granularity: ``tensor``, ``row`` (a scale per index outside the sum), ``block`` (one per ``block`` neighbours
            along the sum) or ``tile`` (one per ``block`` x ``block`` elements, the same for either ``dim``).
            Values of blocks and tiles are divided by their scale again: exactly if it is ``E8M0``, with one more
            rounding if ``float32``. Values of two levels (`two_level`) are multiplied by their block scale, and
            ``dtype`` must hold these products. float8 cannot hold them: it takes one level only, and block scales
            are returned beside the values. Two levels can take float4_e2m1fn_x2.
        block: elements per block, or per side of a tile.
        dim: the dimension that the product sums over, 0 or 1.
        scale_format: ``float32``, ``E8M0`` for powers of two, or for blocks and tiles another format, whose constants
            ``constants`` hold too.
        scale_rounding: how to round to a power of two, as in `compute_scale`; ``4/6`` for two levels.
        statistic: what a scale of one level brings to the format's target: ``amax``, the largest magnitude, or ``rms``,
            the root of the mean square. A history overrides either.
        dtype: dtype of the values. float8 for E4M3 and E5M2; a kernel stores it by columns if ``dim`` is 0.
            float4_e2m1fn_x2 for E2M1 with two-level scales in E4M3, blocks or tiles of 16.
        overwrite: write the values over ``x`` if it has their dtype. Without loops or kernels ``x`` stays as it is.
        first: place of the tensor's first element in its stream; not 0 for a part of a tensor.
        in_memory: True if ``x`` is an input of a compiled graph, such as a weight: the graph does not store it.
        rotate: first rotate the tensor as `rotate_rows` does.

    Returns:
        ``values`` (n, k), with rows filled up to a multiple of 16 if rotated, and ``scale`` float32:
        0-d, (n, 1) or (1, k). For blocks and tiles of one level ``scale`` is None, or in float8 one per block, shaped
        as `amax` returns them. In float4_e2m1fn_x2 the result is a `Packed`: ``values`` are uint8 (n, k / 2) or
        (n / 2, k). A byte has two neighbours along the sum, the first in its lower bits. Values are filled up to whole
        blocks, and lie by columns in memory if ``dim`` is 0. ``blocks`` are E4M3 codes as uint8, one per block.
    """
    if x.dtype not in (torch.float32, torch.bfloat16):  # which loops and kernels read
        x = x.float()
    block = block_code(granularity, block)
    rule = scale_rule(scale_format, scale_rounding, granularity)
    if statistic == "rms" and history is None and block == ONE_SCALE:
        history, method = rms(x).unsqueeze(0), "most-recent"
    # Loops and kernels round to a table's values to nearest alone, and kernels with scales of one level alone.
    of_floats = table_of(constants) is None
    rounds = of_floats or (stream is None and loops_take(constants))
    kernels_round = rounds and (of_floats or (rule < TWO_LEVEL and dtype.itemsize > 1))
    by_kernels = kernels_round and statistic == "amax" and takes_kernels(x, dtype, block, stream is not None)
    if rotate and not by_kernels:
        x, rotate, overwrite = rotate_rows(x), False, True
    codes = has_codes(block, dtype)
    # Loops and tensor operations make bfloat16, cast to float8 at the end, unless block scales are returned beside it.
    made_in = torch.bfloat16 if dtype.itemsize == 1 and not (by_kernels or codes) else dtype
    how: dict[str, Any] = {"block": block, "dim": dim, "rule": rule, "dtype": made_in, "first": first, "stream": stream}
    # The loops support neither codes nor a history of rows, nor an rms of parts.
    of_parts = block != ONE_SCALE and statistic == "rms"
    refused = codes or of_parts or (history is not None and block == ROWS) or not rounds
    found: tuple[Tensor, ...]
    if has_loops(x) and not refused:
        how |= {"method": method, "learns": learns, "overwrite": overwrite}
        found = quantize_by_operator(x, constants, history, **how)
    else:
        # In a graph the compiler finds the amax while it makes the tensor, which saves a kernel that reads the tensor.
        one_amax = rule >= TWO_LEVEL or block == ONE_SCALE
        plain = not (rotate or in_memory or history is not None)
        finds = by_kernels and one_amax and plain and torch.compiler.is_compiling()
        stored = x if in_memory or (by_kernels and not finds) else materialized(x)
        remembered = None if history is None else amax_from_history(history, method)
        largest = amax(stored) if finds or (history is not None and (by_kernels or learns != "nothing")) else None
        if by_kernels:
            known = remembered if largest is None else scaling_amax(remembered, largest)
            how |= {"overwrite": overwrite, "signs": signs_on(x.device) if rotate else None}
            found = quantize_by_operator(stored, constants, known, **how)
        else:
            found = quantize_by_tensors(stored, constants, remembered, **how, statistic=statistic)
        if history is not None and largest is not None:
            learn(history, largest, learns)
    if dtype == PACKED:
        return Packed(*found)
    values, scale, *_ = found
    return Quantized(converted(values, dtype), scale if has_scale(block, rule, dtype) else None)


def rotate_rows(x: Tensor, signs: Tensor | None = None) -> Tensor:
    """Return the random Hadamard transform of each 16 neighbouring rows of ``x`` (n, k), as float32.

        y = H S x / 4

    with the Hadamard matrix H in Sylvester's order and a diagonal matrix S of signs. The rotation spreads a large
    element over its neighbours. It is orthogonal: a product that sums over rows is the same for two tensors rotated
    alike. NVFP4 training rotates both operands of the weight's gradient (NVIDIA 2025, arXiv:2509.25149, section 4.2).

    Sums are of two float32 each, in one order everywhere, so every machine has the same bits.

    Args:
        x: float32 or bfloat16. Rows of zeros fill it up to a multiple of 16; the result has these rows too.
        signs: float32, one per row that is rotated together, a power of two up to 128. Default: the 16 signs of
            Transformer Engine and torchao, the same for all layers and steps. With 128 signs the factor is 1/8 in
            place of 1/4, and the result is longer than ``x`` by the root of two.
    """
    signs = signs_on(x.device) if signs is None else signs
    return torch.ops.altgrad.rotate_rows(x, signs) if has_loops(x) else rotate_by_tensors(x, signs)


def signs_on(device: torch.device) -> Tensor:
    """Return the default signs of `rotate_rows` on ``device``, float32 (16,)."""
    return torch.tensor(HADAMARD_SIGNS, dtype=torch.float32).to(device, non_blocking=True)


def owned(x: Tensor) -> tuple[Tensor, bool]:
    """Return (tensor, overwrite) for `quantize_operand`: (copy of ``x``, True) in a graph with loops, else (x, False).

    The copy costs nothing if ``x`` has no other reader: the operation that makes ``x`` then writes the copy instead.
    """
    if not (torch.compiler.is_compiling() and has_loops(x)):
        return x, False
    return x.clone(memory_format=torch.contiguous_format), True


def encode_operand(values: Tensor, constants: Tensor) -> Tensor:
    """Return codes, uint8 of the same shape, of values of a format of at most 8 bits.

    Of a float format, bit 7 is the sign and the other bits are the magnitude of the rung. -0 becomes 0, which changes a
    product at most in the sign of a zero. The code of -0, 0x80, means NaN, since not every format has a code for NaN.
    Of a table's at most 255 values the code is the place, and 0xFF means NaN.
    """
    encode = torch.ops.altgrad.encode_operand if has_loops(values, constants) else encode_by_tensors
    return encode(values, constants)


def decode_operand(codes: Tensor, constants: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values of codes from `encode_operand`, in ``dtype``."""
    decode = torch.ops.altgrad.decode_operand if has_loops(codes, constants) else decode_by_tensors
    return decode(codes, constants, dtype)


# --- the operators ----------------------------------------------------------------------------------------------------
# On a CPU they are C++ loops (`cpu/kernels.cpp`), on a GPU Triton kernels (`gpu_launch`); torch's dispatcher chooses by
# device. Arguments are numbers, tensors and lists of tensors alone: torch 2.13 leaks a string or an optional tensor at
# each call of a stable operator. So granularity and block are one number, a `block_code`, and optional tensors are
# lists: ``histories`` and ``streams`` are empty or have one entry.

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
    "round_values": "(Tensor x, Tensor constants) -> Tensor",
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
    "round_values": lambda x, constants: x.new_empty(x.shape),
    "encode_operand": lambda values, constants: values.new_empty(values.shape, dtype=torch.uint8),
    "decode_operand": lambda codes, constants, dtype: codes.new_empty(codes.shape, dtype=dtype),
}
for _name, _result in _RESULTS.items():
    torch.library.register_fake(f"altgrad::{_name}", _result)
