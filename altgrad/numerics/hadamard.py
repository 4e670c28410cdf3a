"""The random Hadamard transform: a rotation that spreads what is large in one element over its neighbours.

    y = H S x / 4

for 16 neighbours x, with the Hadamard matrix H in Sylvester's order and a diagonal matrix S of signs. It is its own
inverse but for the signs and orthogonal, so that of two tensors rotated alike along a product's sum the product is what
it was. NVFP4 training rotates both operands of the weight's gradient (NVIDIA 2025, arXiv:2509.25149, section 4.2) with
one vector of signs for all layers and steps; that of Transformer Engine and torchao stands here. `ms_eden` has 128
neighbours and other signs each time.

Sums are of two float32 each, in one order everywhere, and so is the factor, a power of two: every machine has the same
bits. Of 128 neighbours it is an eighth, and y is longer than x by the root of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.numerics.constants import HADAMARD_SIGNS
from altgrad.numerics.cpu.operators import has_loops
from altgrad.numerics.operand_definition import rotate_by_tensors
from altgrad.numerics.tracing import sent


def rotate_rows(x: Tensor, signs: Tensor | None = None) -> Tensor:
    """Return ``x`` (n, k), float32 or bfloat16, with each 16 neighbouring rows rotated: float32.

    It has as many rows as fill the last 16, for which zeros stand in: they add nothing to a product over rows. With
    ``signs`` of their own, float32, it is as many neighbours as these, a power of two up to 128.
    """
    signs = signs_on(x.device) if signs is None else signs
    return torch.ops.altgrad.rotate_rows(x, signs) if has_loops(x) else rotate_by_tensors(x, signs)


def signs_on(device: torch.device) -> Tensor:
    """Return the signs of all layers and steps, float32 (16,)."""
    return sent(torch.tensor(HADAMARD_SIGNS, dtype=torch.float32), device)
