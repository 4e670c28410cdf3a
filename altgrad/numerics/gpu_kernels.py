"""Triton kernels of operands: largest magnitudes, then scale and rounding in one pass.

`operand_definition` and `ms_eden` define the results; every bit agrees. A format is the tensor of its `constants`, so
one compiled kernel serves all float formats and another one all tables. Rules of scales and shapes of tiles are
compiled in. Integers of addresses and places have 64 bits.

Arguments that several kernels share:

- x, y: input and output (rows, columns), each with its strides; y may be x. Rows of x from ``there`` on count as 0.
- grid: the packed constants of the format, whose table begins at TABLE; 0: a float format. known: an amax, used where
  it is positive.
- signs: x is first rotated by these, each 2^LOG neighbouring rows together; LOG = 0: not rotated.
- stream, first: random numbers for stochastic rounding, if DRAWS; see `rounded`.
- H, G, W: a program has a tile of H rows and G groups of W columns, each padded to a power of two.
"""

import triton
import triton.language as tl

from altgrad.numerics.gpu_elements import (
    FLOAT32,
    FOUR_OVER_SIX,
    SIZE,
    TARGET,
    bits,
    block_scale,
    by_chance,
    factor_of,
    float8,
    load,
    nearest,
    nearest_in,
    number,
    over_power_of_two,
    pairs,
    power_below,
    rotated,
    rotated_rows,
    scale_of,
    squared_error,
    store,
    target_of_all,
    tensor_scale,
    uniform_at,
    uniform_rows,
)


@triton.jit
def find_amax(
    x, known, over, signs, found, rows, columns, row_stride, column_stride,
    OF: tl.constexpr, HAS_KNOWN: tl.constexpr, HAS_OVER: tl.constexpr, LOG: tl.constexpr, H: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Write the bits of the largest magnitudes of ``all`` elements, each ``row`` or ``column`` to ``found``, int32.

    ``found`` starts with zeros. As integers these bits are in the order of the magnitudes, with NaN above infinity. If
    ``known`` is positive, ``found`` stays as it is. x is first divided by ``over`` if HAS_OVER.
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
def tile(rows, columns, high, wide, H: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """Return this program's tile: its index along both dimensions; row, group, column of its elements; a mask."""
    across = tl.cdiv(columns, G * wide)
    strip, part = (tl.program_id(0) // across).to(tl.int64), (tl.program_id(0) % across).to(tl.int64)
    h, g, w = tl.arange(0, H)[:, None, None], tl.arange(0, G)[None, :, None], tl.arange(0, W)[None, None, :]
    group = part * G + g
    row, column = strip * high + h, group * wide + w
    return strip, part, row, group, column, (h < high) & (row < rows) & (w < wide) & (column < columns)


@triton.jit
def loaded(x, row, column, row_stride, column_stride, inside, there, signs, LOG: tl.constexpr):
    """Return the elements of a tile (H, G, W) as float32, rotated if LOG > 0."""
    values = load(x + row * row_stride + column * column_stride, inside & (row < there))
    if LOG > 0:
        values = rotated(values, signs, LOG)
    return values


@triton.jit
def rounded(
    x, grid, stream, row_place, column, column_start, DRAWS: tl.constexpr, ALIGNED: tl.constexpr,
    TABLE: tl.constexpr = 0,
):  # fmt: skip
    """Return a tile (H, G, W) rounded to nearest, or stochastically if DRAWS.

    The random number of an element is at ``row_place + column`` of the stream. ALIGNED: in each row of the tile these
    places follow each other from ``column_start`` on, a multiple of 64, so that every drawn number is used.
    """
    if DRAWS:
        if ALIGNED:
            H: tl.constexpr = x.shape[0]
            COUNT: tl.constexpr = x.shape[1] * x.shape[2]
            random = uniform_rows(row_place.reshape((H, 1)) + column_start, stream, COUNT)
            random = random.reshape((H, x.shape[1], x.shape[2]))
        else:
            random = uniform_at(row_place + column, stream)
        found = by_chance(x, grid, random)
    elif TABLE > 0:
        found = nearest_in(grid + TABLE, x)
    else:
        found = nearest(x, grid)
    return found


@triton.jit
def round_at_amax(
    x, y, grid, amaxes, known, known_step, signs, stream, first, scales, there, rows, columns,
    row_stride, column_stride, y_row_stride, y_column_stride,
    RULE: tl.constexpr, OF: tl.constexpr, HAS_KNOWN: tl.constexpr, LOG: tl.constexpr, DRAWS: tl.constexpr,
    ALIGNED: tl.constexpr, TABLE: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Round with one scale for ``all`` elements, each ``row`` or each ``column`` (OF), whose amax has been found.

    amaxes: from `find_amax`, int32. scales: the tensor that gets the scales.
    """
    strip, part, row, _, column, inside = tile(rows, columns, H, 1, H, G, 1)
    values = loaded(x, row, column, row_stride, column_stride, inside, there, signs, LOG)

    # Index of the scale, how many there are, and which program along the other dimension this is.
    at, count, beside = tl.zeros((1, 1, 1), tl.int64), 1, tl.program_id(0)
    if OF == "row":
        at, count, beside = row, rows, part
    if OF == "column":
        at, count, beside = column, columns, strip
    largest = number(tl.load(amaxes + at, mask=at < count, other=0))
    if HAS_KNOWN:
        remembered = tl.load(known + at * known_step, mask=at < count, other=0.0)
        largest = tl.where(remembered > 0, remembered, largest)
    factor = scale_of(largest, tl.load(grid + TARGET).to(tl.float64), grid, RULE)
    if beside == 0:
        tl.store(scales + at, factor, mask=at < count)
    found = rounded(values * factor, grid, stream, first + row * columns, column, part * G, DRAWS, ALIGNED, TABLE)
    store(y + row * y_row_stride + column * y_column_stride, found, inside, grid, True)


@triton.jit
def round_groups(
    x, y, grid, known, known_step, signs, stream, first, scales, there, rows, columns,
    row_stride, column_stride, y_row_stride, y_column_stride, high, wide,
    RULE: tl.constexpr, KEEPS: tl.constexpr, HAS_KNOWN: tl.constexpr, LOG: tl.constexpr, DRAWS: tl.constexpr,
    ALIGNED: tl.constexpr, TABLE: tl.constexpr, H: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Round with a scale for each group of ``high`` rows and ``wide`` columns: blocks, tiles, or short rows.

    KEEPS: values stay scaled, and ``scales`` gets the scales; otherwise values are divided by their scale again.
    known: one amax per row, or one for all rows.
    """
    strip, part, row, group, column, inside = tile(rows, columns, high, wide, H, G, W)
    values = loaded(x, row, column, row_stride, column_stride, inside, there, signs, LOG)

    largest = amax_of_groups(values)
    if HAS_KNOWN:
        remembered = tl.load(known + row * known_step, mask=row < rows, other=0.0)
        largest = tl.where(remembered > 0, remembered, largest)
    factor = scale_of(largest, tl.load(grid + TARGET).to(tl.float64), grid, RULE)
    found = rounded(
        values * factor, grid, stream, first + row * columns, column, part * (G * wide), DRAWS, ALIGNED, TABLE
    )
    if KEEPS:
        groups = tl.cdiv(columns, wide)
        tl.store(scales + strip * groups + group, factor, mask=group < groups)
    elif RULE == FLOAT32:
        found = (found.to(tl.float64) / factor.to(tl.float64)).to(tl.float32)
    else:
        found = over_power_of_two(found, factor)
    store(y + row * y_row_stride + column * y_column_stride, found, inside, grid, KEEPS)


@triton.jit
def round_two_level(
    x, y, grid, amax, known, signs, stream, first, scale, blocks, there, rows, columns,
    row_stride, column_stride, y_row_stride, y_column_stride, high, wide,
    PAIRS: tl.constexpr, RULE: tl.constexpr, HAS_KNOWN: tl.constexpr, LOG: tl.constexpr, DRAWS: tl.constexpr,
    ALIGNED: tl.constexpr, H: tl.constexpr, G: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Round with a scale for each group of ``high`` rows and ``wide`` columns; ``scale`` gets the tensor's scale.

    amax: of all elements, from `find_amax`. PAIRS: -1: y gets values. 0 or 1: a byte of y gets two codes of E2M1 that
    are neighbours along this dimension, and ``blocks`` gets the codes of the groups' scales.
    """
    strip, part, row, group, column, inside = tile(rows, columns, high, wide, H, G, W)
    values = loaded(x, row, column, row_stride, column_stride, inside, there, signs, LOG)

    target, of_all = tl.load(grid + TARGET).to(tl.float64), number(tl.load(amax))
    if HAS_KNOWN:
        of_all = tl.where(tl.load(known) > 0, tl.load(known), of_all)
    whole = tensor_scale(of_all, target_of_all(target, grid, RULE), grid)
    largest = amax_of_groups(values)
    back = block_scale(largest, whole, target, grid)
    if RULE == FOUR_OVER_SIX:
        other = block_scale(largest, whole, power_below(target), grid)
        nearer = squared_error(values, whole, other, grid) < squared_error(values, whole, back, grid)
        back = tl.where(nearer, other, back)
    if tl.program_id(0) == 0:
        tl.store(scale, whole)
    found = rounded(
        values * factor_of(whole, back), grid, stream, first + row * columns, column,
        part * (G * wide), DRAWS, ALIGNED,
    )  # fmt: skip
    if PAIRS >= 0:
        groups, codes = tl.cdiv(columns, wide), tl.where(back != back, 0x7F, float8(back, grid + SIZE))
        tl.store(blocks + strip * groups + group, codes.to(tl.uint8), mask=group < groups)
        if PAIRS == 0:
            row, inside = strip * (H // 2) + tl.arange(0, H // 2)[:, None, None], column < columns
        else:
            column = group * (W // 2) + tl.arange(0, W // 2)[None, None, :]
            inside = (row < rows) & (column < tl.cdiv(columns, W) * (W // 2))
        tl.store(y + row * y_row_stride + column * y_column_stride, pairs(found, grid, PAIRS), mask=inside)
    else:
        store(y + row * y_row_stride + column * y_column_stride, found * back, inside, grid, False)


@triton.jit
def amax_of_groups(values):
    """Return the largest magnitudes of a tile (H, G, W): (1, G, 1)."""
    return number(tl.max(tl.max(bits(values) & 0x7FFFFFFF, axis=2), axis=0))[None, :, None]


@triton.jit
def round_ms_eden(
    x, over, y, grid, amax, signs, stream, first, scales, there, columns, row_stride, column_stride,
    CLIP: tl.constexpr, ROOM: tl.constexpr, HAS_OVER: tl.constexpr, LOG: tl.constexpr, HIGH: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """Divide x by ``over`` if HAS_OVER, rotate it, and write its `ms_eden_by_tensors` to y, which is contiguous.

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
    """Return the sum of each row of x (G, 2^LOG), (G, 1), in the order of `sums_of_blocks`: both halves, and so on.

    Each half becomes the sum of both, so that the tensor does not shrink: otherwise the compiler has each thread
    compute everything that it adds.
    """
    G: tl.constexpr = x.shape[0]
    for _ in tl.static_range(LOG):
        low, high = x.reshape((G, 2, 1 << (LOG - 1))).permute(0, 2, 1).split()
        total = low + high
        x = tl.join(total, total).reshape((G, 1 << LOG))
    return tl.max(x, axis=1)[:, None]  # of equal numbers
