"""Triton functions for the elements of a tile: rounding, random numbers, rotations, storing, and scales.

Every bit is the definition's. Three things need care:

- A fused multiply-add must not round once what the definition rounds twice. Products that enter a sum are exact (as in
  `grid.h`), except for the errors of 4/6, and `gpu_launch` switches fusing off.
- Triton's float32 quotient is an approximation (``div.full``, 2 ulp in PTX's manual). Quotients of scales are float64,
  division by a power of two works on its bits, and `tl.div_rn` is IEEE's.
- NaN, bfloat16 and float8 are handled as bits: a maximum may drop NaN, a cast may truncate, and before compute
  capability 8.9 there is no cast to E4M3. Bits of float32 magnitudes are in order as integers, as atomic maxima need.
"""

import triton
import triton.language as tl

from altgrad.numerics import constants as numbers
from altgrad.numerics import constants as packed

MAX, ULPS, SPACING = tl.constexpr(packed.MAX), tl.constexpr(packed.ULPS), tl.constexpr(packed.SPACING)
ROOT, ZERO = tl.constexpr(packed.ROOT), tl.constexpr(packed.ZERO)
TARGET, SIZE = tl.constexpr(packed.TARGET), tl.constexpr(packed.SIZE)
FIRST, SHIFT, BUCKETS = tl.constexpr(packed.FIRST), tl.constexpr(packed.SHIFT), tl.constexpr(packed.BUCKETS)
TABLE_NUMBERS, LOOKUP = tl.constexpr(packed.TABLE_NUMBERS), tl.constexpr(packed.LOOKUP)
FLOAT32, CEIL, RCEIL, EVEN = (tl.constexpr(packed.SCALE_RULES.index(n)) for n in ("float32", "ceil", "rceil", "even"))
FOUR_OVER_SIX = tl.constexpr(packed.FOUR_OVER_SIX)
ROUNDS, LANES, BITS = tl.constexpr(numbers.ROUNDS), tl.constexpr(numbers.LANES), tl.constexpr(numbers.BITS)
M0, M1 = (tl.constexpr(multiplier) for multiplier in numbers.MULTIPLIERS)
W0, W1 = (tl.constexpr(step) for step in numbers.WEYL)

NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)
MANTISSA = tl.constexpr((1 << 52) - 1)
QUIET_NAN = tl.constexpr(0x7FC00000)
SIGN, INFINITY = tl.constexpr(-(1 << 31)), tl.constexpr(0x7F800000)


@triton.jit
def bits(x):
    """Return the bits of a float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number(x):
    """Return the float32 whose bits are the int32 ``x``."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def over_power_of_two(x, power):
    """Return x / power for a normal power of two; 2^127 has a subnormal reciprocal."""
    reciprocal = (254 << 23) - bits(power)
    return x * number(tl.where(reciprocal > 0, reciprocal, 1 << 22))


@triton.jit
def load(at, mask):
    """Return the elements at ``at`` as float32, 0 where ``mask`` is false. int16 elements are bfloat16."""
    found = tl.load(at, mask=mask, other=0)
    if at.dtype.element_ty == tl.int16:
        found = number(found.to(tl.int32) << 16)
    return found


@triton.jit
def store(at, x, mask, grid, EXACT: tl.constexpr):
    """Write x to ``at``, whose type sets the dtype: float32, int16 for bfloat16, bytes for float8 of format ``grid``.

    bfloat16 is rounded to nearest even. EXACT: bfloat16 holds every value of x, and every NaN is quiet.
    """
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, float8(x, grid).to(tl.uint8), mask=mask)
    elif at.dtype.element_ty == tl.int16:
        wide = bits(x)
        if EXACT:
            narrow = wide >> 16
        else:
            narrow = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
            narrow = tl.where((wide & 0x7FFFFFFF) > INFINITY, 0x7FC0, narrow)
        tl.store(at, narrow.to(tl.int16), mask=mask)
    else:
        tl.store(at, x, mask=mask)


@triton.jit
def float8(x, grid):
    """Return the codes, as from torch's casts, of x, whose values ``grid`` has: E4M3 or E5M2."""
    magnitude, lowest = bits(x) & 0x7FFFFFFF, lowest_normal(grid)
    shift = (bits(tl.load(grid + ULPS)) >> 23) - 127  # 23 - M
    anchor = bits(tl.load(grid + SPACING)) + (23 << 23)  # bits of the float32 whose ulp is the smallest spacing
    below = bits(number(magnitude) + number(anchor)) - anchor
    code = tl.where(magnitude < lowest, below, ((magnitude - lowest) >> shift) + (1 << (23 - shift)))
    return tl.where(magnitude > INFINITY, 0x7F, code) | ((bits(x) >> 24) & 0x80)


@triton.jit
def pairs(x, grid, DIM: tl.constexpr):
    """Return a byte per two neighbours of x (H, G, W) along H (DIM 0) or W (DIM 1), with their E2M1 codes."""
    code = float8(x, grid)
    code = tl.where(x != x, 0, (code & 7) | ((code >> 4) & 8))
    H: tl.constexpr = x.shape[0]
    if DIM == 0:
        low, high = code.reshape((H // 2, 2, x.shape[1], x.shape[2])).permute(0, 2, 3, 1).split()
    else:
        low, high = code.reshape((H, x.shape[1], x.shape[2] // 2, 2)).split()
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def rotated(x, signs, LOG: tl.constexpr):
    """Return `rotate_by_tensors` of x (H, G, W) along H, each 2^LOG neighbours together; 2^LOG divides H."""
    H: tl.constexpr = x.shape[0]
    y = x.permute(1, 2, 0).reshape((x.numel >> LOG, 1 << LOG))
    return rotated_rows(y, signs, LOG).reshape((x.shape[1], x.shape[2], H)).permute(2, 0, 1)


@triton.jit
def rotated_rows(x, signs, LOG: tl.constexpr):
    """Return x (G, 2^LOG) with each row rotated.

    Each of LOG steps turns the two elements whose places differ in the last bit into sum and difference. The last bit
    of a place then becomes its first bit.
    """
    G: tl.constexpr = x.shape[0]
    LENGTH: tl.constexpr = 1 << LOG
    y = x * tl.load(signs + tl.arange(0, LENGTH))[None, :]
    for _ in tl.static_range(LOG):
        low, high = y.reshape((G, LENGTH // 2, 2)).split()
        y = tl.join(low + high, low - high).permute(0, 2, 1).reshape((G, LENGTH))
    return y * 0.5 ** (LOG // 2)


# --- the quantization grid -------------------------------------------------------------------------------------------


@triton.jit
def nearest(x, grid):
    """Return `round_to_grid` of x; the anchor comes from the exponent bits."""
    top = tl.load(grid + MAX)
    ulps, root = bits(tl.load(grid + ULPS)), tl.load(grid + ROOT)
    lowest = lowest_normal(grid)
    anchors = ulps + (1 << 22)  # the bits of 1.5 x 2^23 in binades: x 2^-M
    x = tl.maximum(tl.minimum(x, top, NAN_STAYS), -top, NAN_STAYS)
    binade = tl.maximum(bits(x) & INFINITY, lowest)
    # Without mantissa bits one spacing more where the even code is below: in every other binade.
    beyond = ((binade >> 23) ^ (root < 0).to(tl.int32)) & (root != 0).to(tl.int32)
    anchor = number(binade) * number(anchors + beyond)
    rounded = (x + anchor) - anchor
    return number(bits(rounded) | (bits(x) & bits(tl.load(grid + ZERO))))


@triton.jit
def nearest_in(table, x):
    """Return `round_to_grid` of x, by the look-up of `constants` in ``table``."""
    first, buckets = tl.load(table + FIRST).to(tl.int32), tl.load(table + BUCKETS).to(tl.int32)
    magnitude, limits = bits(x) & 0x7FFFFFFF, table + TABLE_NUMBERS
    key = ((magnitude - 1) >> tl.load(table + SHIFT).to(tl.int32)) + 1  # as defined, and no sum leaves int32
    bucket = tl.minimum(tl.maximum(key - first, 0), buckets - 1) + ((bits(x) >> 31) & buckets)
    second = (magnitude >= bits(tl.load(limits + bucket))).to(tl.int32)
    return tl.where(x != x, x, tl.load(limits + LOOKUP + 2 * bucket + second))


@triton.jit
def lowest_normal(grid):
    """Return the bits of the smallest normal value, 2^M spacings."""
    return bits(tl.load(grid + SPACING)) + (150 << 23) - bits(tl.load(grid + ULPS))


@triton.jit
def by_chance(x, grid, random):
    """Return `round_to_grid_stochastic` of x."""
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
    """Return `grid_spacing` at magnitudes."""
    binade = number(bits(magnitude) & INFINITY)
    return tl.maximum(binade * number(bits(tl.load(grid + ULPS)) - (23 << 23)), tl.load(grid + SPACING))


# --- random numbers --------------------------------------------------------------------------------------------------


@triton.jit
def philox(block, stream):
    """Return the four words of `rounding.philox` for a block of a stream, uint32."""
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
    """Return the float32 in (0, 1) that `rounding.uniform` makes of a uint32 word."""
    return ((word >> (32 - BITS)) * 2 + 1).to(tl.float32) * 2.0 ** -(BITS + 1)


@triton.jit
def uniform_at(place, stream):
    """Return `rounding.uniform` at each ``place``. It uses one of the four words that it computes for a block."""
    block = (place // (4 * LANES)) * LANES + place % LANES
    c0, c1, c2, c3 = philox(block, stream)
    word = (place // LANES) % 4
    return uniform(tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3)))


@triton.jit
def uniform_rows(place, stream, COUNT: tl.constexpr):
    """Return `uniform` at COUNT places from each ``place`` (rows, 1) on, both multiples of 64: (rows, COUNT)."""
    c0, c1, c2, c3 = philox(place // 4 + tl.arange(0, COUNT // 4)[None, :], stream)
    ROWS: tl.constexpr = c0.shape[0]
    SHAPE: tl.constexpr = (ROWS, COUNT // (4 * LANES), LANES)
    even, odd = tl.join(c0.reshape(SHAPE), c2.reshape(SHAPE)), tl.join(c1.reshape(SHAPE), c3.reshape(SHAPE))
    words = tl.join(even, odd).reshape((ROWS, COUNT // (4 * LANES), LANES, 4))
    return uniform(words.permute(0, 1, 3, 2).reshape((ROWS, COUNT)))


# --- scales: quotients are float64, as Triton approximates those of float32 ------------------------------------------


@triton.jit
def scale_of(amax, target, grid, RULE: tl.constexpr):
    """Return `scale_by_rule` as float32, of float32 ``amax`` and float64 ``target``."""
    usable = (amax > 0) & (bits(amax) < INFINITY)
    other = tl.where(amax <= 0, 1.0, number(bits(amax) | QUIET_NAN))
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
    return tl.where(usable, found, other)


@triton.jit
def power_below(target):
    """Return the largest power of two below float64 ``target``."""
    return (((target.to(tl.int64, bitcast=True) - 1) >> 52) << 52).to(tl.float64, bitcast=True)


@triton.jit
def target_of_all(target, grid, RULE: tl.constexpr):
    """Return the target of a tensor's largest magnitude in `two_level_scales`, float64."""
    top = tl.load(grid + SIZE + TARGET).to(tl.float64)
    if RULE == FOUR_OVER_SIX:
        top = top * power_below(target) / target
        top = ((top.to(tl.int64, bitcast=True) >> 52) << 52).to(tl.float64, bitcast=True)
    return target * top


@triton.jit
def tensor_scale(amax, target, grid):
    """Return s, `tensor_scale` of `two_level`."""
    own = grid + SIZE
    whole = scale_of(amax, target, grid, FLOAT32)
    whole = tl.maximum(whole, tl.load(own + TARGET) * 2.0**-126, NAN_STAYS)
    return tl.minimum(whole, tl.load(own + SPACING) * 2.0**127, NAN_STAYS)


@triton.jit
def block_scale(amax, whole, target, grid):
    """Return d_b of `two_level_scales` for blocks with these ``amax`` if s is ``whole``."""
    own = grid + SIZE
    most = tl.load(own + TARGET)
    wanted = (amax.to(tl.float64) * whole.to(tl.float64) / target).to(tl.float32)
    return tl.maximum(nearest(tl.minimum(wanted, most, NAN_STAYS), own), tl.load(own + SPACING), NAN_STAYS)


@triton.jit
def factor_of(whole, back):
    """Return `element_scale`, s / d_b."""
    return (whole.to(tl.float64) / back.to(tl.float64)).to(tl.float32)


@triton.jit
def sum_of_last(x):
    """Return the sums of x (a, b, c) along its last dimension, (a, b, 1), as a tree: both halves, and so on."""
    for _ in tl.static_range(16):
        if x.shape[2] > 1:
            halves = x.reshape((x.shape[0], x.shape[1], 2, x.shape[2] // 2)).permute(0, 1, 3, 2)
            low, high = halves.split()
            x = low + high
    return x


@triton.jit
def squared_error(x, whole, back, grid):
    """Return the squared rounding error of each group of x (H, G, W), summed in the order of `two_level`: (1, G, 1)."""
    scaled = x * factor_of(whole, back)
    off = (nearest(scaled, grid) - scaled) * back
    G: tl.constexpr = x.shape[1]
    of_columns = sum_of_last((off * off).permute(1, 2, 0)).reshape((G, 1, x.shape[2]))
    return sum_of_last(of_columns).reshape((1, G, 1))
