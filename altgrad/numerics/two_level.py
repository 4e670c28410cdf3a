"""Two-level scales, as in NVFP4: a float32 scale of the tensor over block scales that are in a small format themselves.

With e the target of the elements' format, m that of the scales' format, a the amax of the tensor and a_b that of a
block,

    s   = e m / a             in float32
    d_b = round(a_b s / e)    in the scales' format
    q   = round(x (s / d_b))  in the elements' format

The last two round to nearest even and saturate. Operands are ``q d_b``, which is exact; a product is divided by s. In
NVFP4 e is 6 (E2M1), m is 448 (E4M3), and a block has 16 elements (NVIDIA 2025, "Pretraining Large Language Models with
NVFP4", arXiv:2509.25149). Published kernels differ in the order of these operations. Here ``s``, ``a_b s / e``,
``s / d_b`` and its product with x are rounded to float32 once each. The quotients are taken in float64, whose extra
digits exclude double rounding, so every compiler and device gets the same bits. SCALES.md says where torchao differs.

- A scale that would round to zero is the smallest positive one, since zero would lose the whole block. Every element
  then comes out at least as near. A block of zeros has that scale too.
- In a tensor with an Inf or NaN, s and all d_b are NaN.
- s is limited so that no ``s / d_b`` leaves 2^-126..2^127.

**4/6** (Cook et al. 2025, "Four Over Six", arXiv:2512.02010) tries two scales for each block: one brings a_b to e, the
other brings it to p, the largest power of two below e (in E2M1 6 and 4). It takes the second where its elements have
the smaller squared error. Its m is the largest power of two that leaves room for the second scale, which is e / p times
the first: 256 in E4M3. Errors are summed in float32, for each block as a tree, in one order everywhere.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from altgrad.formats import Format
from altgrad.numerics.codes import decode, encode
from altgrad.numerics.compile_utils import materialized
from altgrad.numerics.constants import (
    FLOAT32_RULE,
    FOUR_OVER_SIX,
    SPACING,
    TARGET,
    TWO_LEVEL,
    format_constants,
    scale_constants,
)
from altgrad.numerics.rounding import power_of_two, round_to_grid
from altgrad.numerics.scaling import (
    HIGHEST,
    LOWEST,
    amax,
    broadcast_scale,
    broadcast_tiles,
    floor_log2,
    scale_by_rule,
    scaling_amax,
)


def two_level_scales(
    amaxes: Tensor, constants: Tensor, whole: Tensor | None = None, rule: int = TWO_LEVEL
) -> tuple[Tensor, Tensor]:
    """Return s (0-d) and d_b (the shape of ``amaxes``), float32 and positive; for 4/6, d_b is the first choice.

    Args:
        amaxes: the amax of each block of one tensor, from `amax`.
        constants: of the elements' and the scales' format, from `format_constants`.
        whole: the amax (0-d) that sets s; if it is 0 or None, the largest of ``amaxes`` does.
        rule: `TWO_LEVEL` or `FOUR_OVER_SIX`.

    Raises:
        ValueError: ``constants`` lack the scales' format.
    """
    own = scale_constants(constants)
    target, top = constants[TARGET].double(), own[TARGET].double()
    if rule == FOUR_OVER_SIX:
        top = power_of_two(floor_log2(top * power_below(target) / target))
    whole = tensor_scale(scaling_amax(whole, amax(amaxes)), target * top, own)
    return whole, block_scales(amaxes, whole, target, own)


def tensor_scale(largest: Tensor, target: Tensor, own: Tensor) -> Tensor:
    """Return the s that brings ``largest`` to ``target`` (0-d float64); ``own``: constants of the scales' format."""
    return scale_by_rule(largest, target, FLOAT32_RULE).clamp(LOWEST * own[TARGET], HIGHEST * own[SPACING])


def block_scales(amaxes: Tensor, whole: Tensor, target: Tensor, own: Tensor) -> Tensor:
    """Return the d_b, in the format ``own``, that bring ``amaxes`` to ``target`` (0-d float64) if s is ``whole``."""
    wanted = (amaxes.double() * whole.double() / target).float()
    blocks = round_to_grid(torch.minimum(wanted, own[TARGET]), own)
    return torch.maximum(blocks, own[SPACING])


def power_below(target: Tensor) -> Tensor:
    """Return the largest power of two below ``target``, float64."""
    return power_of_two(floor_log2(target * (1 - 2.0**-52)))


def scales_of_both_levels(
    x: Tensor, amaxes: Tensor, constants: Tensor, whole: Tensor | None, rule: int, *,
    granularity: str, block: int, dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return s and d_b of ``x``. ``amaxes``: of its blocks or tiles; ``whole``: the amax that sets s, or None."""
    whole, blocks = map(materialized, two_level_scales(amaxes, constants, whole, rule))
    if rule != FOUR_OVER_SIX:
        return whole, blocks
    options = {"granularity": granularity, "block": block, "dim": dim}
    lower = block_scales(amaxes, whole, power_below(constants[TARGET].double()), scale_constants(constants))
    first, second = (_squared_errors(x, whole, choice, constants, options) for choice in (blocks, lower))
    return whole, materialized(torch.where(second < first, lower, blocks))


def _squared_errors(x: Tensor, whole: Tensor, blocks: Tensor, constants: Tensor, options: dict[str, Any]) -> Tensor:
    factors, back = (per_element(t, x.shape, **options) for t in (element_scale(whole, blocks), blocks))
    scaled = x.float() * factors
    off = (round_to_grid(scaled, constants) - scaled) * back
    sums = materialized(off * off)
    for along in (-2, -1) if options["granularity"] == "tile" else (options["dim"],):
        sums = sums_of_blocks(sums, options["block"], along)
    return sums


def sums_of_blocks(x: Tensor, block: int, dim: int) -> Tensor:
    """Return the sum of each ``block`` neighbours along ``dim``, as a tree of halves, padded to a power of two."""
    x = x.movedim(dim, -1)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    x = torch.nn.functional.pad(x, (0, (1 << (block - 1).bit_length()) - block))
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x.squeeze(-1).movedim(-1, dim)


def per_element(scale: Tensor, shape: torch.Size, *, granularity: str, block: int, dim: int) -> Tensor:
    """Repeat one scale per block or tile into one per element of ``shape``."""
    if granularity == "tile":
        return broadcast_tiles(scale, shape, block=block)
    return broadcast_scale(scale, shape[dim], block=block, dim=dim)


def element_scale(whole: Tensor, blocks: Tensor) -> Tensor:
    """Return ``s / d_b``, float32, the factor of the elements of each block."""
    return (whole.double() / blocks.double()).float()


class TwoLevel(NamedTuple):
    """A tensor as it is stored: the codes of q, the codes of d_b, one per block, and s (0-d float32)."""

    elements: Tensor
    scales: Tensor
    tensor_scale: Tensor


def encode_two_level(
    x: Tensor, fmt: str | Format, scale_format: str | Format = "E4M3", *, block: int = 16, dim: int = -1
) -> TwoLevel:
    """Return the codes of ``x`` with a scale in ``scale_format`` per ``block`` neighbours along ``dim``.

    Args:
        x: float32 or narrower, any shape; the last block along ``dim`` may be shorter.
        fmt: the elements' format, or its name.
        scale_format: the scales' format, or its name. Published NVFP4 stores the reciprocal of ``tensor_scale``.
        block: elements per block.
        dim: the dimension that blocks lie along.

    Raises:
        ValueError: a format that `format_constants` refuses, or a NaN that ``fmt`` has no code for.
    """
    constants = format_constants(fmt, x.device, scale_format=scale_format)
    whole, blocks = two_level_scales(amax(x, "block", block=block, dim=dim), constants)
    factors = broadcast_scale(element_scale(whole, blocks), x.shape[dim], block=block, dim=dim)
    return TwoLevel(encode(x.float() * factors, fmt), encode(blocks, scale_format), whole)


def decode_two_level(
    stored: TwoLevel, fmt: str | Format, scale_format: str | Format = "E4M3", *, block: int = 16, dim: int = -1
) -> Tensor:
    """Return ``q d_b / s`` (float32, rounded once) of a result of `encode_two_level` with the same options."""
    elements = decode(stored.elements, fmt)
    blocks = broadcast_scale(decode(stored.scales, scale_format), elements.shape[dim], block=block, dim=dim)
    return elements * blocks / stored.tensor_scale
