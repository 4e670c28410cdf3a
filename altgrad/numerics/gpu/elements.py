"""A format's rounding, and `random`'s numbers, for kernels: of the elements that a program has.

Every bit is the definition's, on which three things bear:

- Nothing that is rounded twice in the definition may be once here, by a fused multiply-add. The products that sums are
  made of are exact (`grid.h` rounds in the same way), but for the errors of 4/6, and `launch` switches fusing off.
- Triton's float32 quotient is an approximation (``div.full``, 2 ulp in PTX's manual). Those of scales are float64, a
  power of two divides by its bits, and `tl.div_rn` is IEEE's.
- NaN, bfloat16 and float8 go by their bits: a maximum may pass NaN over, a cast may cut off, and before compute
  capability 8.9 there is none to E4M3. As bits float32 magnitudes are ordered as integers, which atomic maxima have.
"""

import triton
import triton.language as tl

from altgrad.numerics import constants as packed
from altgrad.numerics import random as numbers

MAX, ULPS, SPACING = tl.constexpr(packed.MAX), tl.constexpr(packed.ULPS), tl.constexpr(packed.SPACING)
ROOT, ZERO = tl.constexpr(packed.ROOT), tl.constexpr(packed.ZERO)
ROUNDS, LANES, BITS = tl.constexpr(numbers.ROUNDS), tl.constexpr(numbers.LANES), tl.constexpr(numbers.BITS)
M0, M1 = (tl.constexpr(multiplier) for multiplier in numbers.MULTIPLIERS)
W0, W1 = (tl.constexpr(step) for step in numbers.WEYL)

NAN_STAYS = tl.constexpr(tl.PropagateNan.ALL)
SIGN, INFINITY = tl.constexpr(-(1 << 31)), tl.constexpr(0x7F800000)


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
def store(at, x, mask, grid, EXACT: tl.constexpr):
    """Write float32; bfloat16 to nearest even, as int16; or float8 on its ``grid``, as bytes.

    EXACT: bfloat16 holds them, NaN being quiet.
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
    """Codes of values on the grid of E4M3 or E5M2, as torch's casts have them."""
    magnitude, lowest = bits(x) & 0x7FFFFFFF, lowest_normal(grid)
    shift = (bits(tl.load(grid + ULPS)) >> 23) - 127  # 23 - M
    anchor = bits(tl.load(grid + SPACING)) + (23 << 23)  # whose ulp is the smallest spacing
    below = bits(number(magnitude) + number(anchor)) - anchor
    code = tl.where(magnitude < lowest, below, ((magnitude - lowest) >> shift) + (1 << (23 - shift)))
    return tl.where(magnitude > INFINITY, 0x7F, code) | ((bits(x) >> 24) & 0x80)


@triton.jit
def pairs(x, grid, DIM: tl.constexpr):
    """Bytes of values (H, G, W) on the grid of E2M1: the codes of two neighbours along H, DIM 0, or W, DIM 1."""
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
    """`rotate_by_tensors` of (H, G, W): of each 2^LOG neighbours along H, which is a multiple of that."""
    H: tl.constexpr = x.shape[0]
    y = x.permute(1, 2, 0).reshape((x.numel >> LOG, 1 << LOG))
    return rotated_rows(y, signs, LOG).reshape((x.shape[1], x.shape[2], H)).permute(2, 0, 1)


@triton.jit
def rotated_rows(x, signs, LOG: tl.constexpr):
    """The same of each row of (G, 2^LOG).

    Places that differ in their last bit become their sum and their difference, and this bit the first one, LOG times.
    """
    G: tl.constexpr = x.shape[0]
    LENGTH: tl.constexpr = 1 << LOG
    y = x * tl.load(signs + tl.arange(0, LENGTH))[None, :]
    for _ in tl.static_range(LOG):
        low, high = y.reshape((G, LENGTH // 2, 2)).split()
        y = tl.join(low + high, low - high).permute(0, 2, 1).reshape((G, LENGTH))
    return y * 0.5 ** (LOG // 2)


# --- the quantization grid ------------------------------------------------------------------------------------------


@triton.jit
def nearest(x, grid):
    """`round_to_grid`, with the anchor from the exponent bits."""
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
def lowest_normal(grid):
    """The bits of the smallest normal value, 2^M spacings."""
    return bits(tl.load(grid + SPACING)) + (150 << 23) - bits(tl.load(grid + ULPS))


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
