"""What `operand` computes, in tensor operations: the definition, which the loops of `cpu` agree with to the bit.

It is also what runs where there are no loops: on a GPU, where the compiler fuses it with its surroundings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from altgrad.numerics.constants import NAN_CODE, SPACING, TWO_LEVEL, ULPS
from altgrad.numerics.random import uniform
from altgrad.numerics.rounding import round_to_grid, round_to_grid_stochastic
from altgrad.numerics.scaling import amax, broadcast_scale, scale_by_constants, scale_rule, update_amax_history
from altgrad.numerics.two_level import element_scale, two_level_scales

ONE_SCALE, ROWS = 0, -1  # in place of the number of elements per block


# Operators take numbers, so that granularity and block are one there; it is said here what they mean.
def block_code(granularity: str, block: int) -> int:
    """Return the elements per block, or `ONE_SCALE` or `ROWS`."""
    return {"tensor": ONE_SCALE, "row": ROWS}.get(granularity, block)


def of_block_code(code: int) -> dict[str, Any]:
    """Return ``granularity`` and ``block`` of a `block_code`, as arguments of `amax`."""
    return {"granularity": {ONE_SCALE: "tensor", ROWS: "row"}.get(code, "block"), "block": max(code, 1)}


def has_scale(block: int, rule: int) -> bool:
    """Whether an operand has a scale that the product's result is divided by: all but that of blocks alone."""
    return block <= 0 or rule == TWO_LEVEL


def operand_scale(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, dim: int = 1,
    scale_format: str = "float32", scale_rounding: str = "rceil",
) -> Tensor:  # fmt: skip
    """Return the scale that `quantize_operand` takes, of two levels both in one: float32, broadcastable to ``x``."""
    rule = scale_rule(scale_format, scale_rounding, granularity)
    return _operand_scale(x, constants, remembered, rule, granularity=granularity, block=block, dim=dim)


def _operand_scale(
    x: Tensor, constants: Tensor, remembered: Tensor | None, rule: int, *, granularity: str, block: int, dim: int
) -> Tensor:
    largest = amax(x, granularity, block=block, dim=dim)
    if rule == TWO_LEVEL:
        scale = element_scale(*two_level_scales(largest, constants, remembered))
        return broadcast_scale(scale, x.shape[dim], block=block, dim=dim)
    if granularity != "block" and remembered is not None:
        # Delayed scaling that began with scale 1 would send every gradient of the first step to zero.
        largest = torch.where(remembered > 0, remembered, largest)
    scale = scale_by_constants(largest, constants, rule)
    return broadcast_scale(scale, x.shape[dim], block=block, dim=dim) if granularity == "block" else scale


def materialized(t: Tensor) -> Tensor:
    """Have the compiler store ``t`` instead of computing it anew in each loop that reads it.

    Left alone, Inductor repeats what makes a tensor (a GELU, a softmax) in the loop that finds its amax
    and again in the loop that quantizes it, and repeats a scale's divisions for every vector of
    elements. The result is that of ``t`` either way; without a compiler nothing happens.

    The two signs make it a tensor of the graph's own. Where ``t`` is an input of the graph, such as a weight, torch
    2.13 would else take the result for memory that nobody has, and the backward pass would write into the weight.
    """
    if not torch.compiler.is_compiling():
        return t
    from torch._inductor.inductor_prims import force_stride_order  # a second's import, and of no use in eager mode

    return force_stride_order(t.neg().neg(), t.stride())


def quantize_by_tensors(
    x: Tensor, constants: Tensor, remembered: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None = None, first: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the values (n, k) on the quantization grid, and the scale; by a `block_code` and a `scale_rule`.

    To nearest even, or by chance with the numbers of ``stream`` from place ``first`` on, as `random.uniform` takes it.
    """
    if rule == TWO_LEVEL:
        return _quantize_two_level(x, constants, remembered, block, dim, dtype, stream, first)
    options = of_block_code(block) | {"dim": dim}
    scale = materialized(_operand_scale(x, constants, remembered, rule, **options))
    values = _rounded(x.float() * scale, constants, stream, first)
    if block > 0:
        return (values / scale).to(dtype), x.new_empty(0, dtype=torch.float32)
    return values.to(dtype), scale


def _quantize_two_level(
    x: Tensor, constants: Tensor, remembered: Tensor | None, block: int, dim: int, dtype: torch.dtype,
    stream: Tensor | None, first: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    largest = amax(x, "block", block=block, dim=dim)
    whole, blocks = map(materialized, two_level_scales(largest, constants, remembered))
    scale = materialized(element_scale(whole, blocks))
    scale, blocks = (broadcast_scale(t, x.shape[dim], block=block, dim=dim) for t in (scale, blocks))
    return (_rounded(x.float() * scale, constants, stream, first) * blocks).to(dtype), whole


def _rounded(scaled: Tensor, constants: Tensor, stream: Tensor | None, first: int) -> Tensor:
    if stream is None:
        return round_to_grid(scaled, constants)
    return round_to_grid_stochastic(scaled, constants, materialized(uniform(scaled.shape, stream, first)))


def learn(history: Tensor, largest: Tensor, learns: str) -> None:
    """Take ``largest`` up into a history of amax values, in place, as ``learns`` says in `quantize_operands`."""
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


def encode_by_tensors(values: Tensor, constants: Tensor) -> Tensor:
    """Do what `encode_operand` does."""
    shift, offset = _first_normal_code(constants)
    magnitude = values.float().abs()
    normal = (magnitude.view(torch.int32) >> shift) - offset
    smallest = constants[SPACING]
    subnormal = (magnitude / smallest).nan_to_num().clamp(max=255.0).int()
    code = torch.where(magnitude < smallest * (1 << (23 - shift)), subnormal, normal)
    code = torch.where((values < 0) & (code > 0), code + 0x80, code)
    return torch.where(values.isnan(), NAN_CODE, code).to(torch.uint8)


def decode_by_tensors(codes: Tensor, constants: Tensor, dtype: torch.dtype) -> Tensor:
    """Do what `decode_operand` does."""
    shift, offset = _first_normal_code(constants)
    code = codes.int()
    magnitude = code & 0x7F
    normal = ((magnitude + offset) << shift).view(torch.float32)
    value = torch.where(magnitude < (1 << (23 - shift)), magnitude.float() * constants[SPACING], normal)
    value = torch.where(code > NAN_CODE, -value, value)
    return torch.where(code == NAN_CODE, torch.nan, value).to(dtype)
