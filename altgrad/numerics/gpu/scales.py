"""The scales of `scaling` and `two_level`, for kernels. Quotients are float64: Triton approximates those of float32."""

import triton
import triton.language as tl

from altgrad.numerics import constants as packed
from altgrad.numerics.gpu.elements import INFINITY, NAN_STAYS, bits, nearest, number, spacing_at

SPACING, TARGET, SIZE = tl.constexpr(packed.SPACING), tl.constexpr(packed.TARGET), tl.constexpr(packed.SIZE)
FLOAT32, CEIL, RCEIL, EVEN = (tl.constexpr(packed.SCALE_RULES.index(n)) for n in ("float32", "ceil", "rceil", "even"))
FOUR_OVER_SIX = tl.constexpr(packed.FOUR_OVER_SIX)
MANTISSA = tl.constexpr((1 << 52) - 1)
QUIET_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def scale_of(amax, target, grid, RULE: tl.constexpr):
    """`scale_by_rule`: float32 of float32 ``amax`` and float64 ``target``."""
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
    """The largest power of two below float64 ``target``."""
    return (((target.to(tl.int64, bitcast=True) - 1) >> 52) << 52).to(tl.float64, bitcast=True)


@triton.jit
def target_of_all(target, grid, RULE: tl.constexpr):
    """What `two_level_scales` brings a tensor's largest magnitude to: float64."""
    top = tl.load(grid + SIZE + TARGET).to(tl.float64)
    if RULE == FOUR_OVER_SIX:
        top = top * power_below(target) / target
        top = ((top.to(tl.int64, bitcast=True) >> 52) << 52).to(tl.float64, bitcast=True)
    return target * top


@triton.jit
def tensor_scale(amax, target, grid):
    """`tensor_scale` of `two_level`."""
    own = grid + SIZE
    whole = scale_of(amax, target, grid, FLOAT32)
    whole = tl.maximum(whole, tl.load(own + TARGET) * 2.0**-126, NAN_STAYS)
    return tl.minimum(whole, tl.load(own + SPACING) * 2.0**127, NAN_STAYS)


@triton.jit
def block_scale(amax, whole, target, grid):
    """d_b of `two_level_scales`."""
    own = grid + SIZE
    most = tl.load(own + TARGET)
    wanted = (amax.to(tl.float64) * whole.to(tl.float64) / target).to(tl.float32)
    return tl.maximum(nearest(tl.minimum(wanted, most, NAN_STAYS), own), tl.load(own + SPACING), NAN_STAYS)


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
