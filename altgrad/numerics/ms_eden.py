"""MS-EDEN, the rounding of Quartet II (2026, arXiv:2601.22813): scales are rounded stochastically, elements to nearest.

Each 128 neighbours of a tensor x along a product's sum are rotated by random signs (`rotate_rows`). The result is
rounded to nearest in two-level blocks whose largest magnitude may saturate:

    s   = v m / a                     in float32, v = 6 / (17/16 0.93) and m = 255.99 in NVFP4
    d_b = round(a_b s / v)            in the scales' format, to nearest
    q   = round(x (s / d_b))          in the elements' format, to nearest
    c   = sum z^2 / sum z q           with z = x (s / d_b), over the 128 neighbours
    d_b' = round(c d_b)               in the scales' format, stochastically

An operand's values are q d_b', and the product is divided by s. The factor c lengthens q so that its projection on z is
z (EDEN, Vargaftik et al. 2022, arXiv:2108.08842). The rest of the error is orthogonal to z, so it is zero on average
over rotations in all directions, which random signs and the Hadamard matrix approximate. m leaves room for c. Elements
rounded to nearest have smaller errors than stochastically rounded ones.

The authors' kernels set a scale that would be zero to 1; here it is the smallest one, as in `two_level`. Sums are of
float32 in one order, as trees, and quotients are taken in float64. A CPU has loops for it (`cpu/ms_eden.h`), a GPU a
kernel (`gpu_kernels.py`). SCALES.md has its error and bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.numerics import gpu_launch as launch
from altgrad.numerics.compile_utils import materialized
from altgrad.numerics.constants import TARGET, scale_constants, table_of
from altgrad.numerics.operand import has_loops, rotate_rows
from altgrad.numerics.operand_definition import filled_up
from altgrad.numerics.rounding import round_to_grid, round_to_grid_stochastic, uniform, words
from altgrad.numerics.scaling import amax, broadcast_scale
from altgrad.numerics.two_level import block_scales, element_scale, power_below, sums_of_blocks, tensor_scale

SIZE = 128  # elements that are rotated, and lengthened, together
CLIP = 17 / 16 * 0.93  # the format's largest value over the target of the largest magnitude
ROOM = 255.99 / 256
_PLACES = 1 << 31  # places of a stream for each tensor's scales; the signs lie behind four of these


def random_signs(stream: Tensor, product: int) -> Tensor:
    """Return 128 signs from ``stream``, float32 1 or -1, for the rotation of ``product``, which is 0 or 1."""
    first = 2 * 2 * _PLACES + product * SIZE
    if has_loops(stream):  # one operator in a graph, where Philox is a hundred
        signs: Tensor = torch.ops.altgrad.random_signs(stream, first, SIZE)
        return signs
    return (1 - 2 * (words(SIZE, stream, first) & 1)).float()


def ms_eden_pair(
    a: Tensor,
    b: Tensor,
    constants: Tensor,
    stream: Tensor,
    product: int,
    *,
    block: int = 16,
    dtype: torch.dtype,
    over: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the operands of ``a.T @ b``: the pair (values, scale) of ``a`` and that of ``b``.

    The product ``a_values.T @ b_values``, divided by both scales, is ``a.T @ b`` on average.

    Args:
        a: (n, m), float32 or bfloat16.
        b: (n, k), float32 or bfloat16.
        constants: the formats of the elements and of the block scales, from `format_constants`.
        stream: random numbers, int64 (3,), as `uniform` takes them.
        product: 0 or 1: which of the stream's rotations to use.
        block: elements per scale, a divisor of 128.
        dtype: dtype of the values, which must hold every product of a value and a scale.
        over: None, or a float32 divisor of b: the scale of b if b is already quantized.

    Returns:
        For each, values whose rows are filled up to a multiple of 128, and a 0-d float32 scale.
    """
    signs = random_signs(stream, product)
    found = []
    for i, (x, divisor) in enumerate(((a, None), (b, over))):
        first = (2 * product + i) * _PLACES
        found.append(rotated_ms_eden(x, divisor, signs, constants, stream, first, block, dtype))
    (left, scale), right = found
    return (left, scale * 2), right  # two rotations by an eighth make 2


def rotated_ms_eden(
    x: Tensor, over: Tensor | None, signs: Tensor, constants: Tensor, stream: Tensor, first: int, block: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Divide ``x`` by ``over`` unless it is None, rotate it by ``signs``, and return its `ms_eden`."""
    takes_kernels = table_of(constants) is None and launch.takes_kernels(x, dtype, block)
    if not takes_kernels or (over is not None and over.ndim > 0):
        x = x if over is None else x.float() / over
        return ms_eden(rotate_rows(x, signs), constants, stream, first, block, dtype)
    values = x.new_empty((filled_up(x.shape[0], SIZE), x.shape[1]), dtype=dtype)
    divisor = x.new_empty(0, dtype=torch.float32) if over is None else over
    options = (values, constants, stream, first, block)
    return values, torch.ops.altgrad.rotated_ms_eden_into(x, divisor, signs, *options)


def _rotated_into(
    x: Tensor, over: Tensor, signs: Tensor, values: Tensor, constants: Tensor, stream: Tensor, first: int, block: int
) -> Tensor:
    divisor = over if over.numel() > 0 else None

    def by_tensors() -> Tensor:
        turned = rotate_rows(x if divisor is None else x.float() / divisor, signs)
        found, scale = ms_eden_by_tensors(turned, constants, stream, first, block)
        values.copy_(found)
        return scale

    options = (values, constants, stream, first, block, CLIP, ROOM)
    scale: Tensor = launch.by_kernels(x, lambda: launch.ms_eden_into(x, divisor, signs, *options), by_tensors)
    return scale


torch.library.impl("altgrad::rotated_ms_eden_into", "CUDA")(_rotated_into)


def ms_eden(
    x: Tensor, constants: Tensor, stream: Tensor, first: int, block: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return (values, scale) of ``x`` (n, k), which is already rotated: ``q d_b'`` in ``dtype``, and s (0-d float32).

    n is a multiple of 128. A block is ``block`` neighbouring rows of one column. ``first``: place in ``stream`` of the
    first block's random number; the other blocks follow in the order of `amax`.
    """
    if not has_loops(x) or x.dtype not in (torch.float32, torch.bfloat16):
        values, scale = ms_eden_by_tensors(x, constants, stream, first, block)
        return values.to(dtype), scale
    values = x.new_empty(x.shape, dtype=dtype)
    return values, torch.ops.altgrad.ms_eden_into(x, values, constants, stream, first, block, CLIP, ROOM)


def ms_eden_by_tensors(
    x: Tensor, constants: Tensor, stream: Tensor, first: int, block: int = 16
) -> tuple[Tensor, Tensor]:
    """Define `ms_eden` in tensor operations; values are float32."""
    own = scale_constants(constants)
    target = constants[TARGET].double() / CLIP
    largest = amax(x, granularity="block", block=block, dim=0)
    whole = materialized(tensor_scale(amax(largest), target * (power_below(own[TARGET].double()) * ROOM), own))
    blocks = materialized(block_scales(largest, whole, target, own))
    factors = broadcast_scale(element_scale(whole, blocks), x.shape[0], block=block, dim=0)
    scaled = materialized(x * factors)
    q = round_to_grid(scaled, constants)
    squares, along = (sums_of_blocks(materialized(scaled * other), SIZE, 0) for other in (scaled, q))
    usable = (along > 0) & squares.isfinite()
    longer = torch.where(usable, squares.double() / along.double(), 1.0).float()
    wanted = materialized(blocks * broadcast_scale(longer, blocks.shape[0], block=SIZE // block, dim=0))
    drawn = round_to_grid_stochastic(wanted, own, materialized(uniform(wanted.shape, stream, first)))
    return q * broadcast_scale(drawn, x.shape[0], block=block, dim=0), whole
