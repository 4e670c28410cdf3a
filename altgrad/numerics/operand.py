"""An operand of a quantized matrix product: a tensor on its quantization grid, with the scales that brought it there.

`quantize_operands` is what a training step does with every weight, input and gradient. It is defined in tensor
operations. On a GPU kernels (`gpu.kernels`) do the same in one pass or two, but for what the compiler fuses as well
with its surroundings (`gpu.launch`). On a CPU there are loops in C++ (`cpu.kernels`): amax, scale and rounding take
0.06 ns per element together, where what `torch.compile` makes of the tensor operations takes 0.3 for the rounding
alone. They can overwrite their tensors, which spares a second buffer, which would not be in the cache: in a step of
`nano`, the head's gradient takes 0.6 ms instead of 4.6. They take several tensors at once, since a call costs as much
as 50 thousand elements, and move their amax histories along, which would otherwise be small kernels by the dozen.

`encode_operand` and `decode_operand` keep an operand between the forward and the backward pass in one byte
per element: its rung and sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.numerics.constants import TWO_LEVEL
from altgrad.numerics.cpu.operators import has_loops, needs_groups, quantize_by_loops, quantize_groups_by_loops
from altgrad.numerics.gpu.launch import takes_kernels
from altgrad.numerics.hadamard import rotate_rows, signs_on
from altgrad.numerics.operand_definition import (
    ONE_SCALE,
    PACKED,
    ROWS,
    block_code,
    decode_by_tensors,
    encode_by_tensors,
    has_codes,
    has_scale,
    learn,
    quantize_by_tensors,
)
from altgrad.numerics.scaling import amax, amax_from_history, scale_rule, scaling_amax
from altgrad.numerics.tracing import materialized


class Quantized(NamedTuple):
    """An operand of `quantize_operands`."""

    values: Tensor
    scale: Tensor | None


class Packed(NamedTuple):
    """A packed one, with the codes of its blocks' scales."""

    values: Tensor
    scale: Tensor
    blocks: Tensor


def quantize_operands(
    xs: Sequence[Tensor],
    constants: Sequence[Tensor],
    histories: Sequence[Tensor] = (),
    streams: Sequence[Tensor] = (),
    *,
    method: str = "max",
    learns: str = "nothing",
    granularity: str = "tensor",
    block: int = 32,
    dim: int = 1,
    scale_format: str = "float32",
    scale_rounding: str = "rceil",
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    first: int = 0,
    in_memory: bool = False,
    rotate: bool = False,
) -> list[Quantized]:
    """Return for each tensor ``round(x * scale)``, unscaled, and the scale, for a product that sums over ``dim``.

    No gradient flows; `quantize_operand` has one.

    Args:
        xs: each (n, k), float tensors; float64 is rounded to float32 first.
        constants: their formats, from `format_constants`; ``dtype`` must hold their values.
        histories: float32 (length, ...) each, amax of earlier steps, the newest first and 0 for a step that has not
            been: they set the tensors' one scale, or that of two levels which is above the blocks', or those of rows
            in the shape that `amax` has, if not all 0. Empty: each tensor's own amax does, and so does one that is not
            finite, which makes all that it scales NaN.
        streams: of random numbers, int64 (3,) each, as `random.uniform` takes them: a value is rounded to one of its
            two neighbours by chance, so that it is right on average. Empty: to nearest even.
        method: ``max`` or ``most-recent``, as in `amax_from_history`.
        learns: whether the histories, in place, take up the ``amax`` of their tensors: ``nothing``, that of ``each``
            step, or the ``first`` and no other; never one that is Inf or NaN. Of tensors with one scale.
        granularity: ``tensor``, ``row`` (a scale for each index outside the sum), ``block`` (one per ``block``
            neighbours along the sum) or ``tile`` (one per ``block`` x ``block`` elements, the same for either ``dim``).
            Scales of blocks and tiles are taken off again: exactly in ``E8M0``, and in a format whose products with the
            values ``dtype`` holds, under one scale of the tensor (`two_level`); with one more rounding in ``float32``.
            In a ``dtype`` of float8, which holds the products of no scale, those of one level stay on, and in
            float4_e2m1fn_x2 those of two.
        block: elements per block, or of a tile's side.
        dim: 0 or 1.
        scale_format: ``float32``, ``E8M0`` for powers of two, or for blocks the format whose constants are put behind
            the tensor's own.
        scale_rounding: of powers of two, as in `compute_scale`; ``4/6`` of two levels.
        dtype: of the values; float8 of E4M3 and E5M2 too, which is stored by columns where a kernel writes it and
            ``dim`` is 0; and float4_e2m1fn_x2 of E2M1 with two-level scales in E4M3, of blocks or tiles of 16.
        overwrite: have the values where ``x`` was, if it is the only one and has their dtype; without loops of our
            own, nothing changes.
        first: place in its ``stream`` of a tensor's first element, for a part of one.
        in_memory: they are inputs of a compiled graph, such as weights, which it need not store first.
        rotate: they are rotated first, as by `rotate_rows`.

    Returns:
        ``values`` (n, k), of rotated tensors with the rows that fill the last 16, and ``scale`` float32: 0-d, (n, 1) or
        (1, k), None for blocks and tiles of one level, unless they stay on: then one each, as `amax` has them.
        In float4_e2m1fn_x2 it is a `Packed`: ``values`` are uint8 (n, k / 2) or (n / 2, k), two neighbours along the
        sum in a byte, the first in its lower bits, filled up to whole blocks, and by columns in memory where ``dim`` is
        0; ``blocks`` are E4M3 as uint8, one each.
    """
    xs = list(map(_read_by_loops, xs))
    block = block_code(granularity, block)
    rule = scale_rule(scale_format, scale_rounding, granularity)
    by_kernels = all(takes_kernels(x, dtype, block, len(streams) > 0) for x in xs)
    if rotate and not by_kernels:
        xs, rotate, overwrite = list(map(rotate_rows, xs)), False, True
    codes = has_codes(block, dtype)
    held = torch.bfloat16 if dtype.itemsize == 1 and not (by_kernels or codes) else dtype
    groups = needs_groups(block, rule, len(streams) > 0)
    of_rows = len(histories) > 0 and block == ROWS
    by_loops = all(map(has_loops, xs)) and not (of_rows or codes)  # which no loop knows
    found: list[tuple[Tensor, ...]] = []
    if by_loops and not groups:
        found.extend(quantize_by_loops(xs, constants, histories, method, learns, block, dim, rule, held, overwrite))
    else:
        by_operators = by_kernels or by_loops
        # What the compiler finds while it makes the tensor a kernel need not read it for.
        of_all = rule >= TWO_LEVEL or block == ONE_SCALE
        finds = by_kernels and of_all and not (rotate or in_memory or histories) and torch.compiler.is_compiling()
        for i, x in enumerate(xs):
            stored = x if in_memory or (by_operators and not finds) else materialized(x)
            remembered = amax_from_history(histories[i], method) if histories else None
            stream = streams[i] if streams else None
            largest = amax(stored) if finds or learns != "nothing" or (by_kernels and histories) else None
            if by_kernels and largest is not None:
                remembered = scaling_amax(remembered, largest)
            arguments = (stored, constants[i], remembered, block, dim, rule, held, stream, first)
            if by_operators:
                found.append(quantize_groups_by_loops(*arguments, overwrite, signs_on(x.device) if rotate else None))
            else:
                found.append(quantize_by_tensors(*arguments))
            if histories and largest is not None:
                learn(histories[i], largest, learns)
    if dtype == PACKED:
        return [Packed(*each) for each in found]  # type: ignore[misc] # a pair to all others
    scaled = has_scale(block, rule, dtype)
    return [Quantized(values.to(dtype), scale if scaled else None) for values, scale, *_ in found]


def quantize_operand(
    x: Tensor,
    constants: Tensor,
    remembered: Tensor | None = None,
    *,
    granularity: str = "tensor",
    block: int = 32,
    dim: int = 1,
    scale_format: str = "float32",
    scale_rounding: str = "rceil",
    dtype: torch.dtype = torch.bfloat16,
) -> Quantized:
    """Return what `quantize_operands` makes of ``x`` (n, k), with a gradient.

    That is the gradient of ``x * scale`` with a constant scale: the straight-through estimator. ``remembered`` (0-d
    float32) is the amax that sets the tensor's one scale; that of ``x`` does where it is 0 or None.
    """
    x = _read_by_loops(x)
    block = block_code(granularity, block)
    rule = scale_rule(scale_format, scale_rounding, granularity)
    remembered = x.new_zeros((), dtype=torch.float32) if remembered is None else remembered
    values, scale = torch.ops.altgrad.quantize_operand(x, constants, remembered, block, dim, rule, dtype)
    return Quantized(values, scale if has_scale(block, rule) else None)


def _read_by_loops(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that the loops read, themselves or in a compiled graph's stead."""
    return x if x.dtype in (torch.float32, torch.bfloat16) else x.float()


def owned(x: Tensor) -> tuple[Tensor, bool]:
    """Return ``x`` for `quantize_operands` and whether that may overwrite it: in a compiled step, a copy.

    It costs nothing where ``x`` is not read otherwise, since what makes ``x`` then writes the copy instead.
    """
    if not (torch.compiler.is_compiling() and has_loops(x)):
        return x, False
    return x.clone(memory_format=torch.contiguous_format), True


def encode_operand(values: Tensor, constants: Tensor) -> Tensor:
    """Return one byte per value on the quantization grid of a format of at most 8 bits: uint8, the same shape.

    Bit 7 is the sign, the others are the magnitude of the rung. -0 becomes 0, whose sign no product shows
    but in the sign of a zero; its code stands for NaN, which not every format has.
    """
    encode = torch.ops.altgrad.encode_operand if has_loops(values) else encode_by_tensors
    return encode(values, constants)


def decode_operand(codes: Tensor, constants: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values that `encode_operand` was given."""
    decode = torch.ops.altgrad.decode_operand if has_loops(codes) else decode_by_tensors
    return decode(codes, constants, dtype)
