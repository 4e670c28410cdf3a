"""What scales per block do. Oracles: blocks made by hand, and rounding element by element."""

from __future__ import annotations

import math

import pytest
import torch

from altgrad.numerics import format_constants, get_format, operand_scale
from altgrad.numerics.constants import SIZE, SPACING
from altgrad.numerics.sums import block_statistics


def test_blocks_by_hand():
    """E4M3 has 448 for its largest value: by rceil it stays and 480 is halved; by floor, 480 saturates."""
    x = torch.tensor([[448.0, 1.0, 0.0, -0.0, 1.75, 0.5], [480.0, 0.0, math.nan, math.inf, 2.0**-140, 0.0]])
    constants = format_constants("E4M3", scale_format="E8M0")
    rceil = block_statistics(x, constants, block=2)
    assert (rceil.saturated, rceil.empty) == (0.0, 2 / 6)  # what is not finite counts as zero
    assert rceil.at_limit == 1 / 4 and rceil.spread == 127.0 - -1.0
    floor = block_statistics(x, constants, block=2, scale_rounding="floor")
    assert floor.saturated == 1 / 6 and floor.spread == 127.0
    largest = 448.0 + 1.75 + 480.0 + 2.0**-140
    assert rceil.clamped == 0 and floor.clamped == pytest.approx((480 - 448) / largest, rel=1e-12)


def test_scales_in_a_format_are_at_their_limit_where_the_smallest_one_has_to_do():
    constants = format_constants("E2M1", scale_format="E4M3")
    smallest = constants[SIZE + SPACING].item()
    x = torch.cat([torch.full((1, 16), amax) for amax in (6.0, 3.0, 6 / 448 * smallest, 1e-9, 0.0)], dim=1)
    found = block_statistics(x, constants, block=16, scale_format="E4M3")
    assert (found.empty, found.at_limit) == (1 / 5, 2 / 4)
    assert found.spread == pytest.approx(math.log2(448 / smallest), abs=1e-5)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "rceil", "even"])
def test_a_block_saturates_when_one_of_its_elements_does(rounding):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 70, generator=generator) * torch.exp2(torch.randint(-9, 9, (50, 70), generator=generator))
    constants, fmt = format_constants("E3M4", scale_format="E8M0"), get_format("E3M4")
    options = {"block": 32, "scale_format": "E8M0", "scale_rounding": rounding}
    scale = operand_scale(x, constants, granularity="block", **options)
    beyond = torch.nn.functional.pad((x * scale).abs() > fmt.max, (0, 26)).unflatten(1, (-1, 32)).any(dim=-1)
    found = block_statistics(x, constants, **options)
    assert found.saturated == beyond.double().mean().item()
    blocks = torch.nn.functional.pad(x.abs(), (0, 26)).unflatten(1, (-1, 32)).double().amax(dim=-1)
    kept = torch.minimum(blocks, fmt.max / scale[:, ::32].double())
    assert found.clamped == pytest.approx(1 - (kept.sum() / blocks.sum()).item(), rel=1e-9, abs=1e-15)
    assert (found.saturated > 0) == (rounding in ("floor", "even"))
    scales = scale[:, ::32].log2().flatten().sort().values
    assert found.spread == (scales[-2] - scales[1]).item()  # 150 blocks: one is left out at either end


def test_a_tensor_of_zeros_is_all_empty_and_one_without_elements_has_no_block():
    constants = format_constants("E4M3", scale_format="E8M0")
    assert block_statistics(torch.zeros(2, 8), constants, block=4) == (0.0, 0.0, 1.0, 0.0, 0.0)
    assert block_statistics(torch.zeros(0, 8), constants, block=4) == (0.0, 0.0, 0.0, 0.0, 0.0)
