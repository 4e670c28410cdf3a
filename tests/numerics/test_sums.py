"""What monitors record about a tensor, its blocks, and a step of a weight.

Oracles: exact fractions and cases by hand, and `round_to_grid`. Counts and the largest magnitude agree to the bit; sums
to 1e-6 of their size.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from altgrad.numerics import (
    compute_scale,
    format_constants,
    get_format,
    operand_scale,
    quantize,
    round_to_grid,
    sums,
)
from altgrad.numerics.constants import SIZE, SPACING
from altgrad.numerics.rounding import overflows
from altgrad.numerics.sums import block_statistics, update_sums

DTYPES = [torch.float32, torch.bfloat16]
ONE = torch.tensor(1.0)


def tensor(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return magnitudes over forty binades, with zeros of both signs, NaN, infinities and subnormal numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-40])
    place = torch.randint(0, 20, shape, generator=generator)
    return torch.where(place < 7, odd[place.clamp(max=6)], x).to(dtype)


SCALINGS = [
    {}, {"scale_format": "E8M0", "scale_rounding": "even"}, {"granularity": "row"},
    {"granularity": "block", "block": 16, "scale_format": "E8M0"}, {"granularity": "block", "scale_format": "E4M3"},
]  # fmt: skip


def test_a_rows_amax_at_its_own_scale_is_no_overflow():
    amax, fmt = torch.rand(10_000, 1, generator=torch.Generator().manual_seed(0)) + 2.0**-20, get_format("E3M4")
    assert (amax * compute_scale(amax, fmt) > fmt.max).any()
    assert sums.rounding_sums(amax, format_constants(fmt), granularity="row")[1].overflowed == 0


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 1), (5, 33), (140, 1000)])  # the last in two pieces
@pytest.mark.parametrize("options", SCALINGS, ids=str)
def test_sums_are_those_of_rounding_to_the_grid(options, shape):
    constants = format_constants("E3M4", scale_format=options.get("scale_format", "float32"))
    amaxes = (None, torch.tensor(2.5), torch.tensor(0.0)) if options.get("granularity") is None else (None,)
    for dtype, amax in ((dtype, amax) for dtype in DTYPES for amax in amaxes):
        x = tensor(shape, dtype)
        finite = torch.where(x.isfinite(), x, 0).float()
        if shape[0] == 0 and options:
            continue
        scale = operand_scale(finite, constants, amax, **options)
        rounded = round_to_grid(finite * scale, constants)
        seen, found = sums.rounding_sums(x, constants, amax, **options)
        largest = finite.abs().max().item() if len(x) else 0.0
        assert seen[:3] == (largest, (~x.isfinite()).sum(), torch.count_nonzero(finite))
        assert seen == sums.magnitudes(x) and seen.squares == pytest.approx(finite.double().square().sum().item())
        assert found.overflowed == overflows(finite * scale, constants).sum() and found.scale == scale.median()
        assert found.vanished == torch.count_nonzero(finite) - torch.count_nonzero(rounded)
        lost = (finite * scale - rounded).double() / scale.double()
        assert found.lost == pytest.approx(lost.square().sum().item())
        assert sums.magnitudes(x.t())[:3] == seen[:3]


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


def test_a_scale_that_changes_moves_quantized_values_and_no_master():
    old = torch.tensor([[1.0, -3.0]])
    found = update_sums(old, old, old, torch.ones(1, 2), ONE, 1.125 * ONE, format_constants("E4M3"))
    assert found[:4] == (0, 0, 2, 1)  # 1.125 and -3.375, ties to even -3.5: other codes, for a value down by 1/9
    assert found.rungs == [0.0] * 17 and found.gap == pytest.approx((3.5 / 1.125 - 3) / 0.25, rel=1e-5)


def test_a_scale_that_goes_to_a_power_of_two_changes_only_what_does_not_fit():
    """E4M3 has 2^-9 for its smallest value: at half the scale an odd multiple of that is lost."""
    old = torch.tensor([[1.0, -3.0, 2.0**-9, 3 * 2.0**-9, 448.0]])
    new = torch.tensor([[1.125, -3.0, 0.0, 4 * 2.0**-9, 800.0]])
    wanted = torch.tensor([[1.125, -3.01, 2.0**-9, 3 * 2.0**-9, 800.0]])
    found = update_sums(old, new, wanted, torch.ones(1, 5), ONE, ONE / 2, format_constants("E4M3"))
    assert found[:4] == (3, 1, 4, 1)
