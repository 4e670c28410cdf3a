"""The definition of an operand, in tensor operations. C++ loops and Triton kernels agree with it to the bit.

These operations also run without loops and kernels, and in graphs on a GPU, where the compiler fuses them with others.
"""

from typing import Any

import torch
from torch import Tensor

from altgrad.numerics.compile_utils import materialized
from altgrad.numerics.constants import FLOAT32_RULE, NAN_CODE, NO_PLACE, SPACING, TWO_LEVEL, ULPS, table_of
from altgrad.numerics.rounding import round_to_grid, round_to_grid_stochastic, uniform
from altgrad.numerics.scaling import amax, measured, scale_by_constants, scale_rule, scaling_amax, update_amax_history
from altgrad.numerics.two_level import element_scale, per_element, scales_of_both_levels

FLOAT8 = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}  # formats that FP8 hardware multiplies
PACKED = torch.float4_e2m1fn_x2  # dtype of operands with two codes of E2M1 per byte (uint8) and E4M3 block scales
GROUP = 16  # elements of a block of a packed operand
ONE_SCALE, ROWS = 0, -1  # block codes of one scale per tensor and per row


# --- granularity and block as one number, as operators take them ------------------------------------------------


def block_code(granularity: str, block: int) -> int:
    """Return `ONE_SCALE` for ``tensor``, `ROWS` for ``row``, ``block`` for blocks, ``-block`` for tiles."""
    if granularity == "tile" and block < 2:
        raise ValueError(f"block: expected 2 or more for tiles, got {block}")
    return {"tensor": ONE_SCALE, "row": ROWS, "tile": -block}.get(granularity, block)


def of_block_code(code: int) -> dict[str, Any]:
    """Return the arguments ``granularity`` and ``block`` of `amax` for a `block_code`."""
    granularity = {ONE_SCALE: "tensor", ROWS: "row"}.get(code, "block" if code > 0 else "tile")
    return {"granularity": granularity, "block": max(abs(code), 1)}


def has_codes(block: int, dtype: torch.dtype) -> bool:
    """Whether an operand of ``dtype`` has codes as values, and the scales of blocks or tiles beside them."""
    return block not in (ONE_SCALE, ROWS) and dtype in (*FLOAT8.values(), PACKED)


def has_scale(block: int, rule: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the product has to apply a scale of the operand: always, except for one-level blocks without codes."""
    return block in (ONE_SCALE, ROWS) or rule >= TWO_LEVEL or has_codes(block, dtype)


def scale_shape(
    x: Tensor, block: int, dim: int, rule: int = FLOAT32_RULE, dtype: torch.dtype = torch.float32
) -> tuple[int, ...]:
    """Return the shape of the scale of ``x`` (n, k) as an operand of ``dtype``; (0,) if it has none."""
    n, k = x.shape
    if rule >= TWO_LEVEL or block == ONE_SCALE:
        return ()
    if block == ROWS:
        return (n, 1) if dim != 0 else (1, k)
    return block_shape(n, k, block, dim) if has_codes(block, dtype) else (0,)


def block_shape(rows: int, columns: int, block: int, dim: int) -> tuple[int, int]:
    """Return how many blocks or tiles there are along each dimension."""
    size = abs(block)
    of_rows, of_columns = -(-rows // size), -(-columns // size)
    return of_rows if block < 0 or dim == 0 else rows, of_columns if block < 0 or dim != 0 else columns


def packed_shape(rows: int, columns: int, dim: int) -> tuple[int, int]:
    """Return the shape of the bytes of a packed operand; the last block along the sum is filled up with zeros."""
    return (rows, -(-columns // GROUP) * GROUP // 2) if dim != 0 else (-(-rows // GROUP) * GROUP // 2, columns)


def operand_scale(
    x: Tensor, constants: Tensor, remembered: Tensor | None = None, *,
    granularity: str = "tensor", block: int = 32, dim: int = 1,
    scale_format: str = "float32", scale_rounding: str = "rceil", statistic: str = "amax",
) -> Tensor:  # fmt: skip
    """Return the scale that `quantize_operand` multiplies ``x`` with, float32, broadcastable to ``x``.

    For two levels the result is ``s / d_b`` of `two_level`.
    """
    rule = scale_rule(scale_format, scale_rounding, granularity)
    options: dict[str, Any] = {"granularity": granularity, "block": block, "dim": dim}
    if rule >= TWO_LEVEL:
        scales = scales_of_both_levels(x, amax(x, **options), constants, remembered, rule, **options)
        return per_element(element_scale(*scales), x.shape, **options)
    scale = _scales(x, constants, remembered, rule, **options, statistic=statistic)
    return per_element(scale, x.shape, **options) if granularity in ("block", "tile") else scale


def _scales(
    x: Tensor, constants: Tensor, remembered: Tensor | None, rule: int, *, granularity: str, block: int, dim: int,
    statistic: str = "amax",
) -> Tensor:  # fmt: skip
    """Return the scales of one level, one per tensor, row, block or tile."""
    largest = measured(statistic, x, granularity, block=block, dim=dim)
    if granularity in ("tensor", "row"):
        largest = scaling_amax(remembered, largest)
    return scale_by_constants(largest, constants, rule)


def quantize_by_tensors(
    x: Tensor, constants: Tensor, remembered: Tensor | None, block: int, dim: int, rule: int, dtype: torch.dtype,
    stream: Tensor | None = None, first: int = 0, statistic: str = "amax",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the values (n, k) of an operand and its scale; for dtype `PACKED` also the codes of its block scales.

    Args:
        x: (n, k), float32 or bfloat16.
        constants: the format, from `format_constants`.
        remembered: the amax that sets the scale if it is positive and ``x`` is finite. Otherwise, or if None, the amax
            of ``x`` does.
        block, dim, rule: a `block_code`, the dimension of the sum, and a `scale_rule`.
        dtype: dtype of the values. In float8 the values of blocks and tiles are not divided by their scales again.
        stream, first: random numbers for stochastic rounding, from place ``first`` on; None: to nearest even.
        statistic: ``amax`` or ``rms``, which sets scales of one level.
    """
    options = of_block_code(block) | {"dim": dim}
    if rule >= TWO_LEVEL:
        largest = amax(x, **options)
        whole, blocks = scales_of_both_levels(x, largest, constants, remembered, rule, **options)
        scale = per_element(materialized(element_scale(whole, blocks)), x.shape, **options)
        rounded = _rounded(x.float() * scale, constants, stream, first)
        if dtype == PACKED:
            codes = torch.where(blocks.isnan(), torch.nan, blocks).to(torch.float8_e4m3fn).view(torch.uint8)
            return _packed(rounded, constants, dim), whole, codes
        return (rounded * per_element(blocks, x.shape, **options)).to(dtype), whole
    scales = materialized(_scales(x, constants, remembered, rule, **options, statistic=statistic))
    scale = scales if block in (ONE_SCALE, ROWS) else per_element(scales, x.shape, **options)
    values = _rounded(x.float() * scale, constants, stream, first)
    if has_scale(block, rule, dtype):
        return values.to(dtype), scales
    if rule == FLOAT32_RULE:  # in float64, so that the quotient has the same bits on every device
        return (values.double() / scale.double()).to(torch.float32).to(dtype), x.new_empty(0, dtype=torch.float32)
    return (values / scale).to(dtype), x.new_empty(0, dtype=torch.float32)


def _rounded(scaled: Tensor, constants: Tensor, stream: Tensor | None, first: int) -> Tensor:
    if stream is None:
        return round_to_grid(scaled, constants)
    return round_to_grid_stochastic(scaled, constants, materialized(uniform(scaled.shape, stream, first)))


def _packed(values: Tensor, constants: Tensor, dim: int) -> Tensor:
    """Return the E2M1 codes of ``values`` (n, k), two neighbours along ``dim`` per byte, contiguous along ``dim``."""
    signs = values.signbit() & ~values.isnan()
    codes = (encode_by_tensors(values, constants) & 7) | signs.to(torch.uint8) << 3
    along = codes if dim != 0 else codes.t()
    low, high = torch.nn.functional.pad(along, (0, -along.shape[1] % GROUP)).unflatten(1, (-1, 2)).unbind(2)
    packed = low | high << 4
    return packed if dim != 0 else packed.t()


def filled_up(rows: int, size: int) -> int:
    """Return ``rows`` rounded up to a multiple of ``size``."""
    return (rows + size - 1) // size * size


def rotate_by_tensors(x: Tensor, signs: Tensor) -> Tensor:
    """Define `operand.rotate_rows` in tensor operations."""
    size = signs.shape[0]
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[0] % size))
    y = padded.unflatten(0, (-1, size)) * signs.unsqueeze(-1)
    step = 1
    while step < size:  # rows whose places differ in one bit become their sum and their difference
        pairs = y.unflatten(1, (-1, 2, step))
        low, high = pairs.unbind(2)
        y = torch.stack([low + high, low - high], dim=2).flatten(1, 3)
        step *= 2
    return (y * 0.5 ** ((size.bit_length() - 1) // 2)).flatten(0, 1)


def learn(history: Tensor, largest: Tensor, learns: str) -> None:
    """Store ``largest`` in ``history``, in place, as ``learns`` of `quantize_operand` says."""
    history = history.data  # if a layer is called twice, the backward pass of its second call stores first
    if learns == "each":
        history.copy_(update_amax_history(history, largest))
    elif learns == "first":
        history.copy_(torch.where((history == 0) & largest.isfinite(), largest, history))


def _first_normal_code(constants: Tensor) -> tuple[Tensor, Tensor]:
    """Return (shift, offset), int32 0-d: a normal value's code is its float32 bits >> shift, less the offset."""
    shift = _exponent(constants[ULPS])  # 23 - M
    emin = _exponent(constants[SPACING]) + 23 - shift
    return shift, (emin + 126) << (23 - shift)


def _exponent(power_of_two: Tensor) -> Tensor:
    return (power_of_two.view(torch.int32) >> 23) - 127


def encode_by_tensors(values: Tensor, constants: Tensor) -> Tensor:
    """Define `encode_operand` in tensor operations."""
    if (table := table_of(constants)) is not None:
        return torch.where(values.isnan(), NO_PLACE, table.place(values.float())).to(torch.uint8)
    shift, offset = _first_normal_code(constants)
    magnitude = values.float().abs()
    normal = (magnitude.view(torch.int32) >> shift) - offset
    smallest = constants[SPACING]
    subnormal = (magnitude / smallest).nan_to_num().clamp(max=255.0).int()
    code = torch.where(magnitude < smallest * (1 << (23 - shift)), subnormal, normal)
    code = torch.where((values < 0) & (code > 0), code + 0x80, code)
    return torch.where(values.isnan(), NAN_CODE, code).to(torch.uint8)


def decode_by_tensors(codes: Tensor, constants: Tensor, dtype: torch.dtype) -> Tensor:
    """Define `decode_operand` in tensor operations."""
    if (table := table_of(constants)) is not None:
        return torch.where(codes == NO_PLACE, torch.nan, table.values[codes.int()]).to(dtype)
    shift, offset = _first_normal_code(constants)
    code = codes.int()
    magnitude = code & 0x7F
    normal = ((magnitude + offset) << shift).view(torch.float32)
    value = torch.where(magnitude < (1 << (23 - shift)), magnitude.float() * constants[SPACING], normal)
    value = torch.where(code > NAN_CODE, -value, value)
    return torch.where(code == NAN_CODE, torch.nan, value).to(dtype)
