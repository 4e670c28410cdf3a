"""What monitors add up over a tensor. Oracles: exact fractions by hand, and the tensor operations for the loops in C++.

Counts and the largest magnitude agree to the bit; sums of float64 in another order, to 1e-12 of their size.
"""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from altgrad.numerics import broadcast_scale, compute_scale, format_constants, get_format, operand_scale, quantize, sums
from altgrad.numerics.loops import available
from altgrad.numerics.sums import has_loops

needs_loops = pytest.mark.skipif(not available(), reason="the loops are in C++, and there is no compiler")
SHAPES = [(0, 3), (1, 1), (7, 1), (1, 15), (3, 16), (5, 33), (2, 1024), (3, 1025), (40, 1000)]
DTYPES = [torch.float32, torch.bfloat16]


def tensor(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return magnitudes over forty binades, with zeros of both signs, NaN, infinities and subnormal numbers."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))
    odd = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, -1e-40])
    place = torch.randint(0, 20, shape, generator=generator)
    return torch.where(place < 7, odd[place.clamp(max=6)], x).to(dtype)


def scales(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return scales of each kind, some of which send elements beyond any format."""
    generator = torch.Generator().manual_seed(1)
    several = torch.exp2(torch.randint(-3, 9, (shape[0], -(-shape[1] // 4)), generator=generator))
    each = broadcast_scale(several, shape[1], block=4, dim=1)
    return {"one": torch.tensor(3.7), "a row": 1.1 * several[:, :1], "a block": each}


@needs_loops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loops_add_up_what_the_tensor_operations_do(shape, dtype):
    x = tensor(shape, dtype)
    assert has_loops(x)
    agree(torch.ops.altgrad.magnitudes(x), sums.magnitudes_by_tensors(x), exact=3)
    for name in ("E4M3", "E1M6", "E7M0", "E5M2", "E2M1"):
        constants = format_constants(name)
        for scale in scales(shape).values():
            found = torch.ops.altgrad.rounding_sums(x, constants, scale)
            agree(found, sums.rounding_sums_by_tensors(x, constants, scale), exact=2)
    finite = torch.where(x.isfinite(), x, 0)
    if x.numel():
        agree(torch.ops.altgrad.central_moments(finite), sums.central_moments_by_tensors(finite), exact=0)


def agree(found: torch.Tensor, expected: torch.Tensor, *, exact: int) -> None:
    assert found[:exact].tolist() == expected[:exact].tolist()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def by_tensors(monkeypatch) -> None:
    monkeypatch.setattr(sums, "has_loops", lambda x: False)


SCALINGS = [
    {}, {"scale_format": "E8M0", "scale_rounding": "even"}, {"granularity": "row"},
    {"granularity": "block", "block": 16, "scale_format": "E8M0"}, {"granularity": "block", "scale_format": "E4M3"},
]  # fmt: skip


@pytest.mark.parametrize("loops", [True, False])
def test_a_rows_amax_at_its_own_scale_is_no_overflow(loops, monkeypatch):
    if not loops:
        by_tensors(monkeypatch)
    amax, fmt = torch.rand(10_000, 1, generator=torch.Generator().manual_seed(0)) + 2.0**-20, get_format("E3M4")
    assert (amax * compute_scale(amax, fmt) > fmt.max).any()
    assert sums.rounding_sums(amax, format_constants(fmt), granularity="row")[1].overflowed == 0


@needs_loops
@pytest.mark.parametrize("options", SCALINGS, ids=str)
def test_scales_are_the_same_with_and_without_loops(options, monkeypatch):
    constants = format_constants("E3M4", scale_format=options.get("scale_format", "float32"))
    cases = [
        (tensor((30, 64), dtype), amax) for dtype in DTYPES for amax in (None, torch.tensor(2.5), torch.tensor(0.0))
    ]
    cases = [case for case in cases if case[1] is None or options.get("granularity") is None]
    found = [sums.rounding_sums(x, constants, amax, **options) for x, amax in cases]
    by_tensors(monkeypatch)
    for (x, amax), (seen, rounding) in zip(cases, found, strict=True):
        expected_seen, expected = sums.rounding_sums(x, constants, amax, **options)
        assert seen[:3] == expected_seen[:3] and rounding[:3] == expected[:3]
        assert (seen.squares, rounding.lost) == pytest.approx((expected_seen.squares, expected.lost), rel=1e-12)
        finite = torch.where(x.isfinite(), x, 0)
        assert rounding.scale == operand_scale(finite, constants, amax, **options).median()


@needs_loops
def test_the_loops_take_a_tensor_that_is_not_contiguous():
    x, constants = tensor((30, 20), torch.float32), format_constants("E4M3")
    assert sums.magnitudes(x.t()) == sums.magnitudes(x.t().contiguous())
    for options in SCALINGS[:4]:
        found = sums.rounding_sums(x.t(), constants, **options)
        assert found == sums.rounding_sums(x.t().contiguous(), constants, **options)


@needs_loops
def test_the_loops_add_up_alike_on_any_number_of_threads():
    x, constants = tensor((300, 2000), torch.bfloat16), format_constants("E4M3")
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([sums.rounding_sums(x, constants, **options) for options in SCALINGS[:4]])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.float64])
def test_sums_are_those_of_the_elements_one_by_one(dtype, loops, monkeypatch):
    """In fractions, of numbers that every dtype holds."""
    if not loops:
        by_tensors(monkeypatch)
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
