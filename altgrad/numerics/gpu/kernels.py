"""What `operand_definition` and `ms_eden` define, in Triton: largest magnitudes, and scale and rounding in one pass.

A format is the tensor of its `constants`, so that one compiled kernel serves all; the rule of scales, and how groups of
elements lie, are compiled in. Integers of addresses and places have 64 bits.
"""

import triton
import triton.language as tl

from altgrad.numerics import constants as packed
from altgrad.numerics.gpu.elements import (
    bits,
    by_chance,
    float8,
    load,
    nearest,
    number,
    over_power_of_two,
    pairs,
    rotated,
    rotated_rows,
    store,
    uniform_at,
    uniform_rows,
)
from altgrad.numerics.gpu.scales import (
    block_scale,
    factor_of,
    power_below,
    scale_of,
    squared_error,
    target_of_all,
    tensor_scale,
)

TARGET, SIZE, FLOAT32 = tl.constexpr(packed.TARGET), tl.constexpr(packed.SIZE), tl.constexpr(packed.FLOAT32_RULE)
TWO_LEVEL, FOUR_OVER_SIX = tl.constexpr(packed.TWO_LEVEL), tl.constexpr(packed.FOUR_OVER_SIX)


@triton.jit
def find_amax(
    x, known, over, signs, found, rows, columns, row_stride, column_stride,
    OF: tl.constexpr, HAS_KNOWN: tl.constexpr, HAS_OVER: tl.constexpr, LOG: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Raise ``found``, int32, to the bits of the largest magnitudes of tiles of (H, G): of all, of rows or of columns.

    As such they are ordered, and NaN lies above infinity. What is ``known`` of all needs no finding. Of x divided by
    ``over``, and rotated by 2^LOG ``signs``.
    """
    across = tl.cdiv(columns, G)
    row = (tl.program_id(0) // across).to(tl.int64) * H + tl.arange(0, H)
    column = (tl.program_id(0) % across).to(tl.int64) * G + tl.arange(0, G)
    if HAS_KNOWN:
        rows = tl.where(tl.load(known) > 0, 0, rows)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = load(x + row[:, None] * row_stride + column[None, :] * column_stride, inside)
    if HAS_OVER:
        values = tl.div_rn(values, tl.load(over))
    if LOG > 0:
        values = rotated(values.reshape((H, G, 1)), signs, LOG).reshape((H, G))
    magnitude = bits(values) & 0x7FFFFFFF
    if OF == "all":
        tl.atomic_max(found, tl.max(tl.max(magnitude, axis=1), axis=0))
    if OF == "row":
        tl.atomic_max(found + row, tl.max(magnitude, axis=1), mask=row < rows)
    if OF == "column":
        tl.atomic_max(found + column, tl.max(magnitude, axis=0), mask=column < columns)


@triton.jit
def scale_and_round(
    x, y, grid, amaxes, known, known_step, signs, stream, first, scales, blocks, there, rows, columns,
    row_stride, column_stride, y_row_stride, y_column_stride, high, wide,
    PAIRS: tl.constexpr, RULE: tl.constexpr, OF: tl.constexpr, OWN: tl.constexpr, HAS_KNOWN: tl.constexpr,
    LOG: tl.constexpr, DRAWS: tl.constexpr, ALIGNED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write what `quantize_by_tensors` defines to ``y`` (rows, columns) and ``scales``; x may be y.

    Of x rotated by 2^LOG ``signs``, with 0 for what is not ``there`` of the rows.

    A program has a tile of (H, G, W): up to ``high`` rows of G groups of ``wide`` columns, its axes padded to powers of
    two. OF: what has one scale, ``all`` elements, a ``row``, a ``column`` or a ``group``. OWN: its amax is that of the
    tile's elements, and not among ``amaxes``. Groups whose y is float8 have codes, and their scales beside them. PAIRS:
    the dimension of groups along which two codes of E2M1 are in a byte of y, and their scales in ``blocks``; or -1.
    """
    CODES: tl.constexpr = y.dtype.element_ty == tl.uint8
    across = tl.cdiv(columns, G * wide)
    strip, part = tl.program_id(0) // across, tl.program_id(0) % across
    h, g, w = tl.arange(0, H)[:, None, None], tl.arange(0, G)[None, :, None], tl.arange(0, W)[None, None, :]
    row, column = strip.to(tl.int64) * high + h, (part.to(tl.int64) * G + g) * wide + w
    inside = (h < high) & (row < rows) & (w < wide) & (column < columns)
    values = load(x + row * row_stride + column * column_stride, inside & (row < there))
    if LOG > 0:
        values = rotated(values, signs, LOG)
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
        whole = tensor_scale(of_all, target_of_all(target, grid, RULE), grid)
        back = block_scale(largest, whole, target, grid)
        if RULE == FOUR_OVER_SIX:
            other = block_scale(largest, whole, power_below(target), grid)
            nearer = squared_error(values, whole, other, grid) < squared_error(values, whole, back, grid)
            back = tl.where(nearer, other, back)
        factor = factor_of(whole, back)
        if beside == 0:
            tl.store(scales, whole)
        if PAIRS >= 0:
            groups, group = tl.cdiv(columns, wide), part.to(tl.int64) * G + g
            codes = tl.where(back != back, 0x7F, float8(back, grid + SIZE))
            tl.store(blocks + strip.to(tl.int64) * groups + group, codes.to(tl.uint8), mask=group < groups)
    else:
        if HAS_KNOWN:
            remembered = tl.load(known + at * known_step, mask=at < count, other=0.0)
            largest = tl.where(remembered > 0, remembered, largest)
        factor = scale_of(largest, target, grid, RULE)
        if OF != "group":
            if beside == 0:
                tl.store(scales + at, factor, mask=at < count)
        elif CODES:
            groups, group = tl.cdiv(columns, wide), part.to(tl.int64) * G + g
            tl.store(scales + strip.to(tl.int64) * groups + group, factor, mask=group < groups)

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
    if PAIRS >= 0:
        if PAIRS == 0:
            row, inside = strip.to(tl.int64) * (H // 2) + tl.arange(0, H // 2)[:, None, None], column < columns
        else:
            column = (part.to(tl.int64) * G + g) * (W // 2) + tl.arange(0, W // 2)[None, None, :]
            inside = (row < rows) & (column < tl.cdiv(columns, W) * (W // 2))
        tl.store(y + row * y_row_stride + column * y_column_stride, pairs(found, grid, PAIRS), mask=inside)
    else:
        if RULE >= TWO_LEVEL:
            found = found * back
        elif OF == "group" and not CODES:
            if RULE == FLOAT32:
                found = (found.to(tl.float64) / factor.to(tl.float64)).to(tl.float32)
            else:
                found = over_power_of_two(found, factor)
        store(y + row * y_row_stride + column * y_column_stride, found, inside, grid, OF != "group")


@triton.jit
def round_ms_eden(
    x, over, y, grid, amax, signs, stream, first, scales, there, columns, row_stride, column_stride,
    CLIP: tl.constexpr, ROOM: tl.constexpr, HAS_OVER: tl.constexpr, LOG: tl.constexpr, HIGH: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Write what `ms_eden_by_tensors` defines of x, divided by ``over`` and rotated, to ``y``, contiguous.

    A program has 2^LOG rows of G columns, in blocks of ``HIGH`` rows.
    """
    H: tl.constexpr = 1 << LOG
    BLOCKS: tl.constexpr = H // HIGH
    across = tl.cdiv(columns, G)
    strip, part = (tl.program_id(0) // across).to(tl.int64), (tl.program_id(0) % across).to(tl.int64)
    row, column = strip * H + tl.arange(0, H)[None, :], part * G + tl.arange(0, G)[:, None]
    inside = (row >= 0) & (column < columns)
    values = load(x + row * row_stride + column * column_stride, inside & (row < there))
    if HAS_OVER:
        values = tl.div_rn(values, tl.load(over))
    values = rotated_rows(values, signs, LOG).reshape((G, BLOCKS, HIGH))

    own = grid + SIZE
    target, top = tl.load(grid + TARGET).to(tl.float64) / CLIP, tl.load(own + TARGET).to(tl.float64)
    whole = tensor_scale(number(tl.load(amax)), target * (power_below(top) * ROOM), grid)
    back = block_scale(number(tl.max(bits(values) & 0x7FFFFFFF, axis=2)), whole, target, grid)
    scaled = values * factor_of(whole, back)[:, :, None]
    q = nearest(scaled, grid)
    squares, along = sum_of_rows((scaled * scaled).reshape((G, H)), LOG), sum_of_rows((scaled * q).reshape((G, H)), LOG)
    usable = (along > 0) & (squares < float("inf"))
    longer = squares.to(tl.float64) / tl.where(usable, along, 1.0).to(tl.float64)
    wanted = back * tl.where(usable, longer, 1.0).to(tl.float32)
    place = first + (strip * BLOCKS + tl.arange(0, BLOCKS)[None, :]) * columns + column
    drawn = by_chance(wanted, own, uniform_at(place, stream))
    store(y + row * columns + column, (q * drawn[:, :, None]).reshape((G, H)), inside, grid, False)
    if tl.program_id(0) == 0:
        tl.store(scales, whole)


@triton.jit
def sum_of_rows(x, LOG: tl.constexpr):
    """(G, 2^LOG) to (G, 1), as `sums_of_blocks` adds: both halves, and so on.

    Each half becomes the sum of both: of tensors that shrink the compiler would have each thread make all that it adds.
    """
    G: tl.constexpr = x.shape[0]
    for _ in tl.static_range(LOG):
        low, high = x.reshape((G, 2, 1 << (LOG - 1))).permute(0, 2, 1).split()
        total = low + high
        x = tl.join(total, total).reshape((G, 1 << LOG))
    return tl.max(x, axis=1)[:, None]  # of equal numbers
