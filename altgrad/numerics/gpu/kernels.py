"""What `operand_definition` defines, as two Triton kernels: the largest magnitudes, and scale and rounding in one pass.

A format is the tensor of its `constants`, so that one compiled kernel serves all; the rule of scales, and how groups of
elements lie, are compiled in. Integers of addresses and places have 64 bits.
"""

import triton
import triton.language as tl

from altgrad.numerics import constants as packed
from altgrad.numerics.gpu.elements import (
    bits,
    by_chance,
    load,
    nearest,
    number,
    over_power_of_two,
    store,
    uniform_at,
    uniform_rows,
)
from altgrad.numerics.gpu.scales import block_scale, factor_of, power_below, scale_of, squared_error, tensor_scale

TARGET, FLOAT32 = tl.constexpr(packed.TARGET), tl.constexpr(packed.FLOAT32_RULE)
TWO_LEVEL, FOUR_OVER_SIX = tl.constexpr(packed.TWO_LEVEL), tl.constexpr(packed.FOUR_OVER_SIX)


@triton.jit
def find_amax(
    x, known, found, rows, columns, row_stride, column_stride,
    OF: tl.constexpr, HAS_KNOWN: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Raise ``found``, int32, to the bits of the largest magnitudes of tiles of (H, G): of all, of rows or of columns.

    As such they are ordered, and NaN lies above infinity. What is ``known`` of all needs no finding.
    """
    across = tl.cdiv(columns, G)
    row = (tl.program_id(0) // across).to(tl.int64) * H + tl.arange(0, H)
    column = (tl.program_id(0) % across).to(tl.int64) * G + tl.arange(0, G)
    if HAS_KNOWN:
        rows = tl.where(tl.load(known) > 0, 0, rows)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    magnitude = bits(load(x + row[:, None] * row_stride + column[None, :] * column_stride, inside)) & 0x7FFFFFFF
    if OF == "all":
        tl.atomic_max(found, tl.max(tl.max(magnitude, axis=1), axis=0))
    if OF == "row":
        tl.atomic_max(found + row, tl.max(magnitude, axis=1), mask=row < rows)
    if OF == "column":
        tl.atomic_max(found + column, tl.max(magnitude, axis=0), mask=column < columns)


@triton.jit
def scale_and_round(
    x, y, grid, amaxes, known, known_step, stream, first, scales, rows, columns, row_stride, column_stride, high, wide,
    RULE: tl.constexpr, OF: tl.constexpr, OWN: tl.constexpr, HAS_KNOWN: tl.constexpr, DRAWS: tl.constexpr,
    ALIGNED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write what `quantize_by_tensors` defines to ``y`` (contiguous) and ``scales``; x may be y.

    A program has a tile of (H, G, W): up to ``high`` rows of G groups of ``wide`` columns, its axes padded to powers of
    two. OF: what has one scale, ``all`` elements, a ``row``, a ``column`` or a ``group``. OWN: its amax is that of the
    tile's elements, and not among ``amaxes``.
    """
    across = tl.cdiv(columns, G * wide)
    strip, part = tl.program_id(0) // across, tl.program_id(0) % across
    h, g, w = tl.arange(0, H)[:, None, None], tl.arange(0, G)[None, :, None], tl.arange(0, W)[None, None, :]
    row, column = strip.to(tl.int64) * high + h, (part.to(tl.int64) * G + g) * wide + w
    inside = (h < high) & (row < rows) & (w < wide) & (column < columns)
    values = load(x + row * row_stride + column * column_stride, inside)
    target = tl.load(grid + TARGET).to(tl.float64)

    at, count, beside = tl.zeros((1, 1, 1), tl.int64), 1, tl.program_id(0)
    if OF == "row":
        at, count, beside = row, rows, part
    if OF == "column":
        at, count, beside = column, columns, strip
    if OWN:
        largest = number(tl.max(tl.max(bits(values) & 0x7FFFFFFF, axis=2), axis=0))[None, :, None]
    else:
        largest = number(tl.load(amaxes + at, mask=at < count, other=0))
    if RULE >= TWO_LEVEL:
        of_all = number(tl.load(amaxes))
        if HAS_KNOWN:
            of_all = tl.where(tl.load(known) > 0, tl.load(known), of_all)
        whole = tensor_scale(of_all, target, grid, RULE)
        back = block_scale(largest, whole, target, grid)
        if RULE == FOUR_OVER_SIX:
            other = block_scale(largest, whole, power_below(target), grid)
            nearer = squared_error(values, whole, other, grid) < squared_error(values, whole, back, grid)
            back = tl.where(nearer, other, back)
        factor = factor_of(whole, back)
        if beside == 0:
            tl.store(scales, whole)
    else:
        if HAS_KNOWN:
            remembered = tl.load(known + at * known_step, mask=at < count, other=0.0)
            largest = tl.where(remembered > 0, remembered, largest)
        factor = scale_of(largest, target, grid, RULE)
        if OF != "group":  # noqa: SIM102 - the compiler knows this one, and the device the next
            if beside == 0:
                tl.store(scales + at, factor, mask=at < count)

    scaled = values * factor
    if DRAWS:
        if ALIGNED:
            start = (first + row * columns).reshape((H, 1)) + part.to(tl.int64) * (G * wide)
            random = uniform_rows(start, stream, G * W).reshape((H, G, W))
        else:
            random = uniform_at(first + row * columns + column, stream)
        found = by_chance(scaled, grid, random)
    else:
        found = nearest(scaled, grid)
    if RULE >= TWO_LEVEL:
        found = found * back
    elif OF == "group":
        if RULE == FLOAT32:
            found = (found.to(tl.float64) / factor.to(tl.float64)).to(tl.float32)
        else:
            found = over_power_of_two(found, factor)
    store(y + row * columns + column, found, inside, OF != "group")
