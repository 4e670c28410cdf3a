"""What a step did to a weight. Oracles: a case by hand, and the tensor operations for the loops in C++."""

from __future__ import annotations

import pytest
import torch

from altgrad.numerics import format_constants, get_format, refined_constants, sums
from altgrad.numerics.loops import available
from altgrad.numerics.sums import HIGHEST_BINADE, LOWEST_BINADE, update_sums_by_tensors

SHAPES = [(0, 3), (1, 1), (7, 5), (3, 1025), (40, 1000)]


@pytest.fixture(params=[True, False], ids=["loops", "tensors"])
def either(request, monkeypatch):
    """Do what the test says with the loops in C++, if there are any, and without."""
    if not request.param:
        monkeypatch.setattr(sums, "has_loops", lambda x: False)


def step_of(shape: tuple[int, int]) -> list[torch.Tensor]:
    """Return weights over twenty binades, zeros among them, after a step of most of them, as wanted, and a gradient."""
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(share: float) -> torch.Tensor:
        kept = torch.rand(shape, generator=generator) < share
        return torch.where(kept, torch.randn(shape, generator=generator), 0.0)

    old = normal(0.9) * torch.exp2(torch.randint(-20, 3, shape, generator=generator).float())
    new = old + 0.01 * normal(0.7)
    return [old, new, new + 1e-3 * normal(0.5), normal(0.9)]


@pytest.mark.skipif(not available(), reason="the loops are in C++, and there is no compiler")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loops_count_what_the_tensor_operations_do(shape):
    step = step_of(shape)
    assert all(map(sums.has_loops, step))
    rows = torch.rand((shape[0], 1), generator=torch.Generator().manual_seed(0)) + 0.5
    for name, refinement in (("E4M3", 1), ("E4M3", 256), ("E1M6", 1), ("E7M0", 1), ("E2M1", 1)):
        constants = refined_constants(get_format(name), refinement)
        two, more = torch.tensor(2.0), torch.tensor(2.1)
        for before, after in ((two, more), (rows, 1.5 * rows), (two, rows), (rows, 5.8 * rows)):
            filled = [t if t.numel() == 1 else t.expand(shape).contiguous() for t in (before, after)]
            ends = (LOWEST_BINADE, HIGHEST_BINADE)
            found = torch.ops.altgrad.update_sums(*step, *filled, constants, refinement, *ends)
            expected = update_sums_by_tensors(*step, before, after, constants, refinement)
            assert found[:4].tolist() == expected[:4].tolist()
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def test_a_step_by_hand(either):
    """E4M3 at scale 1: an ulp of 1/8 from 1 to 2 and of 1/4 from 2 to 4, at scale 2 half of those."""
    old = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.0, -1.5]])
    wanted = torch.tensor([[1.125, 1.01, 0.875, 1.0], [2.26, 2.25, 0.0, -1.5]])
    new = torch.tensor([[1.125, 1.0, 0.875, 1.0], [2.25, 2.25, 0.0, -1.5]])
    grad = torch.tensor([[-1.0, -1.0, -1.0, 5.0], [0.0, -1e-30, 1.0, 1.0]])
    one = torch.tensor(1.0)
    found = sums.update_sums(old, new, wanted, grad, one, one, format_constants("E4M3"))
    assert found[:4] == (5, 1, 4, 2)  # up against g < 0 twice; down against it, and across g = 0
    assert found.gap == pytest.approx(0.01 * 8 + 0.01 * 4, rel=1e-5)
    assert found.counts == [1, *[0] * 15, 7]  # the zero below all others
    assert found.rungs == [0.0, *[0.0] * 15, 1 + 1 + 1 + 1]
    finer = sums.update_sums(old, new, wanted, grad, 2 * one, 2 * one, format_constants("E4M3"))
    assert finer[:4] == found[:4] and finer.gap == pytest.approx(found.gap, rel=1e-5)  # a power of two is no change


def test_a_scale_that_changes_moves_what_products_see_and_no_master(either):
    old = torch.tensor([[1.0, -3.0]])
    one = torch.tensor(1.0)
    found = sums.update_sums(old, old, old, torch.ones(1, 2), one, 1.125 * one, format_constants("E4M3"))
    assert found[:4] == (0, 0, 2, 1)  # 1.125 and -3.375, ties to even -3.5: other codes, for a value down by 1/9
    assert found.rungs == [0.0] * 17 and found.gap == pytest.approx((3.5 / 1.125 - 3) / 0.25, rel=1e-5)


def test_a_scale_that_goes_to_a_power_of_two_changes_only_what_does_not_fit(either):
    """E4M3 has 2^-9 for its smallest value: at half the scale an odd multiple of that is lost."""
    old = torch.tensor([[1.0, -3.0, 2.0**-9, 3 * 2.0**-9, 448.0]])
    new = torch.tensor([[1.125, -3.0, 0.0, 4 * 2.0**-9, 800.0]])
    wanted = torch.tensor([[1.125, -3.01, 2.0**-9, 3 * 2.0**-9, 800.0]])
    one = torch.tensor(1.0)
    found = sums.update_sums(old, new, wanted, torch.ones(1, 5), one, one / 2, format_constants("E4M3"))
    assert found[:4] == (3, 1, 4, 1)
