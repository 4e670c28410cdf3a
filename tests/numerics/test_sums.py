"""What monitors record about a tensor, its blocks, and a step of a weight.

Oracles: exact fractions and cases by hand, rounding element by element, and the tensor operations for the loops in C++.
Counts and the largest magnitude agree to the bit; sums of float64 in another order, to 1e-12 of their size.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from altgrad.numerics import (
    broadcast_scale,
    compute_scale,
    format_constants,
    get_format,
    operand_scale,
    quantize,
    refined_constants,
    sums,
)
from altgrad.numerics.constants import SIZE, SPACING
from altgrad.numerics.loops import available
from altgrad.numerics.sums import HIGHEST_BINADE, LOWEST_BINADE, block_statistics, update_sums

needs_loops = pytest.mark.skipif(not available(), reason="the loops are in C++, and there is no compiler")
SHAPES = [(0, 3), (1, 1), (7, 1), (1, 15), (5, 33), (3, 1025), (40, 1000)]
DTYPES = [torch.float32, torch.bfloat16]
ONE = torch.tensor(1.0)


@pytest.fixture(params=[True, False], ids=["loops", "tensors"])
def either(request, monkeypatch):
    """Do what the test says with the loops in C++, if there are any, and without."""
    if not request.param:
        monkeypatch.setattr(sums, "has_loops", lambda x: False)


def tensor(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return magnitudes over forty binades, with zeros of both signs, NaN, infinities and subnormal numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-40])
    place = torch.randint(0, 20, shape, generator=generator)
    return torch.where(place < 7, odd[place.clamp(max=6)], x).to(dtype)


def agree(found: torch.Tensor, expected: torch.Tensor, *, exact: int) -> None:
    assert found[:exact].tolist() == expected[:exact].tolist()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


@needs_loops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loops_add_up_what_the_tensor_operations_do(shape, dtype):
    x = tensor(shape, dtype)
    assert sums.has_loops(x)
    agree(torch.ops.altgrad.magnitudes(x), sums.magnitudes_by_tensors(x), exact=3)
    exponents = torch.randint(-3, 9, (shape[0], -(-shape[1] // 4)), generator=torch.Generator().manual_seed(1))
    several = torch.exp2(exponents)
    for name in ("E4M3", "E1M6", "E7M0", "E5M2", "E2M1"):
        constants = format_constants(name)
        for scale in (torch.tensor(3.7), 1.1 * several[:, :1], broadcast_scale(several, shape[1], block=4, dim=1)):
            found = torch.ops.altgrad.rounding_sums(x, constants, scale)
            agree(found, sums.rounding_sums_by_tensors(x, constants, scale), exact=2)
    finite = torch.where(x.isfinite(), x, 0)
    if x.numel():
        agree(torch.ops.altgrad.central_moments(finite), sums.central_moments_by_tensors(finite), exact=0)


SCALINGS = [
    {}, {"scale_format": "E8M0", "scale_rounding": "even"}, {"granularity": "row"},
    {"granularity": "block", "block": 16, "scale_format": "E8M0"}, {"granularity": "block", "scale_format": "E4M3"},
]  # fmt: skip


@pytest.mark.usefixtures("either")
def test_a_rows_amax_at_its_own_scale_is_no_overflow():
    amax, fmt = torch.rand(10_000, 1, generator=torch.Generator().manual_seed(0)) + 2.0**-20, get_format("E3M4")
    assert (amax * compute_scale(amax, fmt) > fmt.max).any()
    assert sums.rounding_sums(amax, format_constants(fmt), granularity="row")[1].overflowed == 0


@needs_loops
@pytest.mark.parametrize("options", SCALINGS, ids=str)
def test_scales_are_the_same_with_and_without_loops(options, monkeypatch):
    constants = format_constants("E3M4", scale_format=options.get("scale_format", "float32"))
    amaxes = (None, torch.tensor(2.5), torch.tensor(0.0)) if options.get("granularity") is None else (None,)
    cases = [(tensor((30, 64), dtype), amax) for dtype in DTYPES for amax in amaxes]
    by_loops = [sums.rounding_sums(x, constants, amax, **options) for x, amax in cases]
    monkeypatch.setattr(sums, "has_loops", lambda x: False)
    for (x, amax), (seen, rounding) in zip(cases, by_loops, strict=True):
        expected_seen, expected = sums.rounding_sums(x, constants, amax, **options)
        assert seen[:3] == expected_seen[:3] and rounding[:3] == expected[:3]
        assert (seen.squares, rounding.lost) == pytest.approx((expected_seen.squares, expected.lost), rel=1e-12)
        finite = torch.where(x.isfinite(), x, 0)
        assert rounding.scale == operand_scale(finite, constants, amax, **options).median()


@needs_loops
def test_the_loops_take_any_strides_and_add_up_alike_on_any_number_of_threads():
    x, constants = tensor((300, 2000), torch.bfloat16), format_constants("E4M3")
    assert sums.magnitudes(x.t()) == sums.magnitudes(x.t().contiguous())
    threads = torch.get_num_threads()
    for options in SCALINGS[:4]:
        results = [sums.rounding_sums(x.t(), constants, **options)]
        try:
            torch.set_num_threads(3)
            results.append(sums.rounding_sums(x.t().contiguous(), constants, **options))
        finally:
            torch.set_num_threads(threads)
        assert results[0] == results[1]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
def test_sums_are_those_of_the_elements_one_by_one(dtype):
    """In fractions, of numbers that every dtype holds."""
    x = torch.tensor([[448.0, 2.0**-11, 17.0, 300.0], [0.0, -1000.0, math.nan, -math.inf]], dtype=dtype)
    finite = [Fraction(v) for v in x.flatten().tolist() if math.isfinite(v)]
    fmt = get_format("E4M3")
    for amax, scale in ((448.0, 1.0), (1792.0, 0.25)):
        (*counted, squares), rounding = sums.rounding_sums(x, format_constants(fmt), torch.tensor(amax))
        assert counted == [1000.0, 2, 5] and squares == pytest.approx(float(sum(v * v for v in finite)), rel=1e-14)
        rounded = [Fraction(v) for v in quantize(torch.tensor([float(v) for v in finite]), fmt, scale=scale).tolist()]
        assert rounding == (
            scale,
            sum(abs(v) * Fraction(scale) > Fraction(fmt.max) for v in finite),
            sum(v != 0 and q == 0 for v, q in zip(finite, rounded, strict=True)),
            pytest.approx(float(sum((v - q) ** 2 for v, q in zip(finite, rounded, strict=True))), rel=1e-14),
        )


def test_kurtosis_of_known_distributions():
    assert sums.excess_kurtosis(torch.tensor([-1.0, 1.0])) == pytest.approx(-2.0)
    normal = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    assert abs(sums.excess_kurtosis(normal)) < 0.05
    assert sums.excess_kurtosis(torch.ones(5)) == 0.0


# --- blocks ----------------------------------------------------------------------------------------------------------


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
    assert block_statistics(torch.zeros(2, 8), constants, block=4) == (0.0, 0.0, 1.0, 0.0, 0.0)
    assert block_statistics(torch.zeros(0, 8), constants, block=4) == (0.0, 0.0, 0.0, 0.0, 0.0)


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


# --- a step of a weight ----------------------------------------------------------------------------------------------


def step_of(shape: tuple[int, int]) -> list[torch.Tensor]:
    """Return weights over twenty binades, zeros among them, after a step of most of them, as wanted, and a gradient."""
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(share: float) -> torch.Tensor:
        kept = torch.rand(shape, generator=generator) < share
        return torch.where(kept, torch.randn(shape, generator=generator), 0.0)

    old = normal(0.9) * torch.exp2(torch.randint(-20, 3, shape, generator=generator).float())
    new = old + 0.01 * normal(0.7)
    return [old, new, new + 1e-3 * normal(0.5), normal(0.9)]


@needs_loops
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 1025), (40, 1000)])
def test_the_loops_count_what_the_tensor_operations_do_in_a_step(shape):
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
            agree(found, sums.update_sums_by_tensors(*step, before, after, constants, refinement), exact=4)


@pytest.mark.usefixtures("either")
def test_a_step_by_hand():
    """E4M3 at scale 1: an ulp of 1/8 from 1 to 2 and of 1/4 from 2 to 4, at scale 2 half of those."""
    old = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.0, -1.5]])
    wanted = torch.tensor([[1.125, 1.01, 0.875, 1.0], [2.26, 2.25, 0.0, -1.5]])
    new = torch.tensor([[1.125, 1.0, 0.875, 1.0], [2.25, 2.25, 0.0, -1.5]])
    grad = torch.tensor([[-1.0, -1.0, -1.0, 5.0], [0.0, -1e-30, 1.0, 1.0]])
    found = update_sums(old, new, wanted, grad, ONE, ONE, format_constants("E4M3"))
    assert found[:4] == (5, 1, 4, 2)  # up against g < 0 twice; down against it, and across g = 0
    assert found.gap == pytest.approx(0.01 * 8 + 0.01 * 4, rel=1e-5)
    assert found.counts == [1, *[0] * 15, 7]  # the zero below all others
    assert found.rungs == [0.0, *[0.0] * 15, 1 + 1 + 1 + 1]
    finer = update_sums(old, new, wanted, grad, 2 * ONE, 2 * ONE, format_constants("E4M3"))
    assert finer[:4] == found[:4] and finer.gap == pytest.approx(found.gap, rel=1e-5)  # a power of two is no change


@pytest.mark.usefixtures("either")
def test_a_scale_that_changes_moves_quantized_values_and_no_master():
    old = torch.tensor([[1.0, -3.0]])
    found = update_sums(old, old, old, torch.ones(1, 2), ONE, 1.125 * ONE, format_constants("E4M3"))
    assert found[:4] == (0, 0, 2, 1)  # 1.125 and -3.375, ties to even -3.5: other codes, for a value down by 1/9
    assert found.rungs == [0.0] * 17 and found.gap == pytest.approx((3.5 / 1.125 - 3) / 0.25, rel=1e-5)


@pytest.mark.usefixtures("either")
def test_a_scale_that_goes_to_a_power_of_two_changes_only_what_does_not_fit():
    """E4M3 has 2^-9 for its smallest value: at half the scale an odd multiple of that is lost."""
    old = torch.tensor([[1.0, -3.0, 2.0**-9, 3 * 2.0**-9, 448.0]])
    new = torch.tensor([[1.125, -3.0, 0.0, 4 * 2.0**-9, 800.0]])
    wanted = torch.tensor([[1.125, -3.01, 2.0**-9, 3 * 2.0**-9, 800.0]])
    found = update_sums(old, new, wanted, torch.ones(1, 5), ONE, ONE / 2, format_constants("E4M3"))
    assert found[:4] == (3, 1, 4, 1)
