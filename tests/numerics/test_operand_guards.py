"""The loops write where their tensor is and nowhere else. Oracle: what lies before and behind it in memory."""

from __future__ import annotations

import pytest
import torch

from altgrad.numerics import format_constants, quantize_operands

SHAPES = [(1, 1), (1, 7), (5, 37), (33, 64), (70, 129), (3, 8193), (257, 300)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity, block", [("tensor", 1), ("row", 1), ("block", 32), ("block", 5)])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_lies_beside_a_tensor_in_memory_stays(dtype: torch.dtype, granularity: str, block: int, dim: int) -> None:
    guard, generator = 256, torch.Generator().manual_seed(0)
    for rows, columns in SHAPES:
        for factor in (1.0, 2.0**-120):  # the usual way, and that of scales beyond the quantization grid
            memory = (factor * torch.randn(rows * columns + 2 * guard, generator=generator)).to(dtype)
            before = memory.clone()
            x = memory[guard:-guard].view(rows, columns)
            alone = quantize_operands(
                [x.clone()], [format_constants("E3M4")], granularity=granularity, block=block, dim=dim,
                scale_format="E8M0", dtype=dtype,
            )  # fmt: skip
            (found,) = quantize_operands(
                [x], [format_constants("E3M4")], granularity=granularity, block=block, dim=dim, scale_format="E8M0",
                dtype=dtype, overwrite=True,
            )  # fmt: skip
            assert found.values is x and torch.equal(x, alone[0].values) and alone[0].values.dtype == dtype
            assert torch.equal(memory[:guard], before[:guard]) and torch.equal(memory[-guard:], before[-guard:])
