"""What `operand_definition` defines, as two Triton kernels: the largest magnitudes, and scale and rounding in one pass.

A format is the tensor of its `constants`, so that one compiled kernel serves all; the rule of scales, and how groups of
elements lie, are compiled in. Every bit is the definition's, on which three things bear:

- Nothing that is rounded twice in the definition may be once here, by a fused multiply-add. The products that sums are
  made of are exact (`grid.h` rounds in the same way), but for the errors of 4/6, and `launch` switches fusing off.
- Triton's float32 quotient is an approximation. Those of scales are float64; a power of two divides by its bits.
- NaN and bfloat16 go by their bits: a maximum may pass NaN over, and a cast may cut off.

Integers of addresses and places have 64 bits.
"""

import triton
import triton.language as tl

from altgrad.numerics import constants as packed
from altgrad.numerics import random as numbers

MAX, ULPS, SPACING = tl.constexpr(packed.MAX), tl.constexpr(packed.ULPS), tl.constexpr(packed.SPACING)
ROOT, ZERO, TARGET = tl.constexpr(packed.ROOT), tl.constexpr(packed.ZERO), tl.constexpr(packed.TARGET)
SIZE = tl.constexpr(packed.SIZE)
FLOAT32, CEIL, RCEIL, EVEN = (tl.constexpr(packed.SCALE_RULES.index(n)) for n in ("float32", "ceil", "rceil", "even"))
TWO_LEVEL, FOUR_OVER_SIX = tl.constexpr(packed.TWO_LEVEL), tl.constexpr(packed.FOUR_OVER_SIX)
ROUNDS, LANES, BITS = tl.constexpr(numbers.ROUNDS), tl.constexpr(numbers.LANES), tl.constexpr(numbers.BITS)
M0, M1 = (tl.constexpr(multiplier) for multiplier in numbers.MULTIPLIERS)
W0, W1 = (tl.constexpr(step) for step in numbers.WEYL)

NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)
SIGN, INFINITY, MANTISSA = tl.constexpr(-(1 << 31)), tl.constexpr(0x7F800000), tl.constexpr((1 << 52) - 1)


@triton.jit
def bits(x):
    """As int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number(x):
    """The float32 of bits."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def over_power_of_two(x, power):
    """x / power, for a normal power of two; 2^127 has a subnormal reciprocal."""
    reciprocal = (254 << 23) - bits(power)
    return x * number(tl.where(reciprocal > 0, reciprocal, 1 << 22))


@triton.jit
def load(at, mask):
    """Elements as float32; those of bfloat16 come as int16."""
    found = tl.load(at, mask=mask, other=0)
    if at.dtype.element_ty == tl.int16:
        found = number(found.to(tl.int32) << 16)
    return found


@triton.jit
def store(at, x, mask, EXACT: tl.constexpr):
    """Write float32, or bfloat16 to nearest even, as int16; EXACT: it holds them, NaN being quiet."""
    if at.dtype.element_ty == tl.int16:
        wide = bits(x)
        if EXACT:
            narrow = wide >> 16
        else:
            narrow = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
            narrow = tl.where((wide & 0x7FFFFFFF) > INFINITY, 0x7FC0, narrow)
        tl.store(at, narrow.to(tl.int16), mask=mask)
    else:
        tl.store(at, x, mask=mask)


# --- the quantization grid ------------------------------------------------------------------------------------------


@triton.jit
def nearest(x, grid):
    """`round_to_grid`, with the anchor from the exponent bits."""
    top = tl.load(grid + MAX)
    ulps, root = bits(tl.load(grid + ULPS)), tl.load(grid + ROOT)
    lowest = bits(tl.load(grid + SPACING)) + (150 << 23) - ulps  # of the normal values, whose ulps are 2^(23 - M)
    anchors = ulps + (1 << 22)  # the bits of 1.5 x 2^23 in binades: x 2^-M
    x = tl.maximum(tl.minimum(x, top, NAN_STAYS), -top, NAN_STAYS)
    binade = tl.maximum(bits(x) & INFINITY, lowest)
    # Without mantissa bits one spacing more where the even code is below: in every other binade.
    beyond = ((binade >> 23) ^ (root < 0).to(tl.int32)) & (root != 0).to(tl.int32)
    anchor = number(binade) * number(anchors + beyond)
    rounded = (x + anchor) - anchor
    return number(bits(rounded) | (bits(x) & bits(tl.load(grid + ZERO))))


@triton.jit
def by_chance(x, grid, random):
    """`round_to_grid_stochastic`."""
    top = tl.load(grid + MAX)
    magnitude = tl.minimum(number(bits(x) & 0x7FFFFFFF), top, NAN_STAYS)
    spacing = spacing_at(magnitude, grid)
    steps = over_power_of_two(magnitude, spacing)
    below = steps.to(tl.int32).to(tl.float32)  # Triton's floor is the library's, which flushes subnormals
    rounded = (below + (random < steps - below).to(tl.float32)) * spacing
    rounded = tl.minimum(rounded, top)
    found = number(bits(rounded) | (bits(x) & SIGN)) + tl.load(grid + ZERO)
    return tl.where(x != x, x, found)


@triton.jit
def spacing_at(magnitude, grid):
    """`grid_spacing`."""
    binade = number(bits(magnitude) & INFINITY)
    return tl.maximum(binade * number(bits(tl.load(grid + ULPS)) - (23 << 23)), tl.load(grid + SPACING))


# --- scales ---------------------------------------------------------------------------------------------------------


@triton.jit
def scale_of(amax, target, grid, RULE: tl.constexpr):
    """`scale_by_rule`: float32 of float32 ``amax`` and float64 ``target``."""
    usable = (amax > 0) & (bits(amax) < INFINITY)
    amax = tl.where(usable, amax, 1.0).to(tl.float64)
    if RULE == FLOAT32:
        ratio = target / amax
        ratio = tl.where(ratio < 2.0**-126, 2.0**-126, ratio)
        found = tl.where(ratio > 2.0**127, 2.0**127, ratio).to(tl.float32)
    else:
        of_target, of_amax = target.to(tl.int64, bitcast=True), amax.to(tl.int64, bitcast=True)
        # Exponents of target and amax apart, and one less where the mantissa of amax is beyond a limit.
        limit = MANTISSA
        if RULE == CEIL:
            limit = 0
        if RULE == RCEIL:
            limit = of_target & MANTISSA
        if RULE == EVEN:  # with half a spacing on it amax reaches the next power of two, whose mantissa is even
            spacing = spacing_at(target.to(tl.float32), grid).to(tl.float64)
            half = spacing / (((of_target >> 52) + 1) << 52).to(tl.float64, bitcast=True)
            limit = ((1.0 - half) * 4503599627370496.0).to(tl.int64) - 1
        exponent = (of_target >> 52) - (of_amax >> 52) - ((of_amax & MANTISSA) > limit).to(tl.int64)
        exponent = tl.minimum(tl.maximum(exponent, -126), 127)
        found = number(((exponent + 127) << 23).to(tl.int32))
    return tl.where(usable, found, 1.0)


@triton.jit
def power_below(target):
    """The largest power of two below float64 ``target``."""
    return (((target.to(tl.int64, bitcast=True) - 1) >> 52) << 52).to(tl.float64, bitcast=True)


@triton.jit
def tensor_scale(amax, target, grid, RULE: tl.constexpr):
    """s of `two_level_scales`."""
    own = grid + SIZE
    top = tl.load(own + TARGET).to(tl.float64)
    if RULE == FOUR_OVER_SIX:
        top = top * power_below(target) / target
        top = ((top.to(tl.int64, bitcast=True) >> 52) << 52).to(tl.float64, bitcast=True)
    whole = scale_of(amax, target * top, grid, FLOAT32)
    whole = tl.maximum(whole, tl.load(own + TARGET) * 2.0**-126)
    return tl.minimum(whole, tl.load(own + SPACING) * 2.0**127)


@triton.jit
def block_scale(amax, whole, target, grid):
    """d_b of `two_level_scales`."""
    own = grid + SIZE
    most = tl.load(own + TARGET)
    finite = bits(amax) < INFINITY
    wanted = (tl.where(finite, amax, 0.0).to(tl.float64) * whole.to(tl.float64) / target).to(tl.float32)
    wanted = tl.where(finite & (wanted < most), wanted, most)
    return tl.maximum(nearest(wanted, own), tl.load(own + SPACING))


@triton.jit
def factor_of(whole, back):
    """`element_scale`."""
    return (whole.to(tl.float64) / back.to(tl.float64)).to(tl.float32)


@triton.jit
def sum_of_last(x):
    """(a, b, c) to (a, b, 1), as a tree: both halves are added, and so on."""
    for _ in tl.static_range(16):
        if x.shape[2] > 1:
            halves = x.reshape((x.shape[0], x.shape[1], 2, x.shape[2] // 2)).permute(0, 1, 3, 2)
            low, high = halves.split()
            x = low + high
    return x


@triton.jit
def squared_error(x, whole, back, grid):
    """Of each group of (H, G, W), in the order of `two_level`: (1, G, 1)."""
    scaled = x * factor_of(whole, back)
    off = (nearest(scaled, grid) - scaled) * back
    G: tl.constexpr = x.shape[1]
    of_columns = sum_of_last((off * off).permute(1, 2, 0)).reshape((G, 1, x.shape[2]))
    return sum_of_last(of_columns).reshape((1, G, 1))


# --- random numbers -------------------------------------------------------------------------------------------------


@triton.jit
def philox(block, stream):
    """The four words of `random.philox` for ``block`` of a stream, uint32."""
    seed = tl.load(stream).to(tl.uint32)
    c0, c1, c2, c3 = block.to(tl.uint32), tl.load(stream + 2).to(tl.uint32), tl.load(stream + 1).to(tl.uint32), seed
    for i in tl.static_range(ROUNDS):
        p0, p1 = c0.to(tl.uint64) * M0, c2.to(tl.uint64) * M1
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ ((i * W0) & 0xFFFFFFFF)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ ((i * W1) & 0xFFFFFFFF)
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform(word):
    """What `random.uniform` makes of a word."""
    return ((word >> (32 - BITS)) * 2 + 1).to(tl.float32) * 2.0 ** -(BITS + 1)


@triton.jit
def uniform_at(place, stream):
    """`random.uniform` at each ``place``: a block's four words are four places, of which three are thrown away."""
    block = (place // (4 * LANES)) * LANES + place % LANES
    c0, c1, c2, c3 = philox(block, stream)
    word = (place // LANES) % 4
    return uniform(tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3)))


@triton.jit
def uniform_rows(place, stream, COUNT: tl.constexpr):
    """The same for ``COUNT`` places from each ``place`` (rows, 1) on, which are multiples of 64: none thrown away."""
    c0, c1, c2, c3 = philox(place // 4 + tl.arange(0, COUNT // 4)[None, :], stream)
    ROWS: tl.constexpr = c0.shape[0]
    SHAPE: tl.constexpr = (ROWS, COUNT // (4 * LANES), LANES)
    even, odd = tl.join(c0.reshape(SHAPE), c2.reshape(SHAPE)), tl.join(c1.reshape(SHAPE), c3.reshape(SHAPE))
    words = tl.join(even, odd).reshape((ROWS, COUNT // (4 * LANES), LANES, 4))
    return uniform(words.permute(0, 1, 3, 2).reshape((ROWS, COUNT)))


# --- the two kernels ------------------------------------------------------------------------------------------------


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
