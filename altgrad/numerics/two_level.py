"""Two-level scales: a float32 scale per tensor over a scale per block that is in a small format itself, as in NVFP4.

With e the target of the elements' format and m that of the scales' format, a the amax of the tensor and a_b that of a
block,

    s   = e m / a             in float32
    d_b = round(a_b s / e)    in the scales' format
    q   = round(x (s / d_b))  in the elements' format

the last two to nearest even, saturating. A product takes ``q d_b``, which is exact, and its result is divided by s. In
NVFP4 e is 6 (E2M1), m is 448 (E4M3), and a block has 16 elements (NVIDIA 2025, "Pretraining Large Language Models with
NVFP4", arXiv:2509.25149). Published kernels differ in the order of these operations. Here ``s``, ``a_b s / e``,
``s / d_b`` and its product with x are rounded to float32 once each. The quotients are taken in float64: it has so many
more digits that none of them is rounded twice, and every compiler and device gets the same bits.

- A scale that would round to zero is the smallest positive one, since zero would lose the whole block: so every element
  comes out at least as near. A block of zeros has that scale too.
- Of a tensor with an Inf or a NaN s is 1, as every scale with such an amax, and d_b is m in the blocks with one.
- s stays so far inside float32 that no ``s / d_b`` leaves 2^-126..2^127.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from altgrad.formats import Format
from altgrad.numerics.codes import decode, encode
from altgrad.numerics.constants import FLOAT32_RULE, SPACING, TARGET, format_constants, scale_constants
from altgrad.numerics.rounding import round_to_grid
from altgrad.numerics.scaling import HIGHEST, LOWEST, amax, broadcast_scale, scale_by_rule


def two_level_scales(amaxes: Tensor, constants: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return s (0-d) and d_b (the shape of ``amaxes``), float32 and positive.

    Args:
        amaxes: of the blocks of one tensor, from `amax`.
        constants: from `format_constants`, with those of the scales' format.
        whole: amax of the tensor (0-d), if these are not all of its blocks; their own where it is 0.

    Raises:
        ValueError: ``constants`` are of the elements alone.
    """
    own = scale_constants(constants)
    target, top = constants[TARGET].double(), own[TARGET].double()
    largest = amax(amaxes)
    largest = largest if whole is None else torch.where(whole > 0, whole, largest)
    whole = scale_by_rule(largest, target * top, FLOAT32_RULE)
    whole = whole.clamp(LOWEST * own[TARGET], HIGHEST * own[SPACING])
    wanted = torch.where(amaxes.isfinite(), amaxes.double() * whole.double() / target, top).float()
    blocks = round_to_grid(torch.minimum(wanted, own[TARGET]), own)
    return whole, torch.maximum(blocks, own[SPACING])


def element_scale(whole: Tensor, blocks: Tensor) -> Tensor:
    """Return ``s / d_b``, float32: what the elements of each block are multiplied with."""
    return (whole.double() / blocks.double()).float()


class TwoLevel(NamedTuple):
    """A tensor as it is stored: the codes of q and of d_b, one of these per block, and s (0-d float32)."""

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
        dim: along which blocks lie.

    Raises:
        ValueError: a format that is not computed with, or a NaN that ``fmt`` has no code for.
    """
    constants = format_constants(fmt, x.device, scale_format=scale_format)
    whole, blocks = two_level_scales(amax(x, "block", block=block, dim=dim), constants)
    factors = broadcast_scale(element_scale(whole, blocks), x.shape[dim], block=block, dim=dim)
    return TwoLevel(encode(x.float() * factors, fmt), encode(blocks, scale_format), whole)


def decode_two_level(
    stored: TwoLevel, fmt: str | Format, scale_format: str | Format = "E4M3", *, block: int = 16, dim: int = -1
) -> Tensor:
    """Return ``q d_b / s`` (float32), rounded once, of what `encode_two_level` returned for the same options."""
    elements = decode(stored.elements, fmt)
    blocks = broadcast_scale(decode(stored.scales, scale_format), elements.shape[dim], block=block, dim=dim)
    return elements * blocks / stored.tensor_scale
