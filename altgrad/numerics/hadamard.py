"""The random Hadamard transform: a rotation that spreads what is large in one element over its neighbours.

    y = H S x / 4

for 16 neighbours x, with the Hadamard matrix H in Sylvester's order and a diagonal matrix S of signs. It is its own
inverse but for the signs and orthogonal, so that of two tensors rotated alike along a product's sum the product is what
it was. NVFP4 training rotates both operands of the weight's gradient (NVIDIA 2025, arXiv:2509.25149, section 4.2) with
one vector of signs for all layers and steps; that of Transformer Engine and torchao stands here.

Sums are of two float32 each, in one order everywhere, and the quarter is exact: every machine has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.numerics.constants import HADAMARD_SIGNS
from altgrad.numerics.cpu.operators import has_loops

SIZE = len(HADAMARD_SIGNS)


def rotate_rows(x: Tensor) -> Tensor:
    """Return ``x`` (n, k), float32 or bfloat16, with each 16 neighbouring rows rotated: float32.

    It has as many rows as fill the last 16, for which zeros stand in: they add nothing to a product over rows.
    """
    return torch.ops.altgrad.rotate_rows(x) if has_loops(x) else rotate_by_tensors(x)


def rotate_by_tensors(x: Tensor) -> Tensor:
    """Do what `rotate_rows` does: the definition."""
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x.device).unsqueeze(-1)
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[0] % SIZE))
    y = padded.unflatten(0, (-1, SIZE)) * signs
    step = 1
    while step < SIZE:  # rows whose places differ in one bit become their sum and their difference
        pairs = y.unflatten(1, (-1, 2, step))
        low, high = pairs.unbind(2)
        y = torch.stack([low + high, low - high], dim=2).flatten(1, 3)
        step *= 2
    return (y * 0.25).flatten(0, 1)
