"""Mistakes that published quantizers make, each as the case that shows it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from altgrad.formats import get_format
from altgrad.numerics import compute_scale, format_constants, quantize, round_to_grid, ulp
from altgrad.numerics.check.prove import decision_points
from altgrad.numerics.check.reference import round_scalar
from altgrad.numerics.constants import ANCHOR, MAX, ROOT, SPACING, ULPS, packed_constants
from altgrad.numerics.rounding import SUCCESSOR
from tests.numerics.numerics_oracles import EIGHT_BIT_SPLITS, KERNEL_FORMATS, assert_identical, name_of, random_patterns

PATHS = {
    "kernel": lambda x, fmt: round_to_grid(x, format_constants(fmt)),
    "eager": quantize,
    "general": lambda x, fmt: quantize(x.double(), fmt).float(),
}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def patterns(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).int().view(torch.float32)


@every_path
def test_ties_of_powers_of_two_alternate(path):
    """round(x / ulp) * ulp sends every tie of E7M0 up, a bias of a binade on 1 in 128 bfloat16 values."""
    x = torch.tensor([1.5, 3.0, 6.0, 12.0, -1.5, -3.0])
    assert path(x, "E7M0").tolist() == [2.0, 2.0, 8.0, 8.0, -2.0, -2.0]


@every_path
def test_tie_below_the_smallest_power_of_two_goes_to_zero(path):
    x = torch.tensor([2.0**-63, 1.0001 * 2.0**-63, 1.5 * 2.0**-62])
    assert path(x, "E7M0").tolist() == [0.0, 2.0**-62, 2.0**-61]


@every_path
def test_ties_follow_the_code_when_the_bias_is_even(path):
    """The parity of float32's exponent is that of the code only for odd biases; here it is 64."""
    fmt = get_format("binary8p1")
    x = torch.tensor([1.5, 3.0, 6.0, 12.0])
    assert path(x, fmt).tolist() == [1.0, 4.0, 4.0, 16.0] == [round_scalar(v, fmt) for v in x.tolist()]


@every_path
@pytest.mark.parametrize("fmt", EIGHT_BIT_SPLITS, ids=name_of)
def test_just_below_a_power_of_two_the_lower_binade_is_used(path, fmt):
    """floor(log2(x)) is one too high there in 250 of 254 float32 binades."""
    powers = 2.0 ** torch.arange(-126, 128, dtype=torch.float64)
    x = torch.nextafter(powers.float(), torch.tensor(0.0))
    assert_identical(path(x, fmt), torch.tensor([round_scalar(v, fmt) for v in x.tolist()]), x)
    inside = (powers > 2 * fmt.smallest) & (powers <= fmt.max) & (powers > 2.0**fmt.emin)
    assert torch.equal(ulp(x[inside], fmt) * 2, ulp(powers[inside].float(), fmt))


@every_path
@pytest.mark.parametrize("fmt", [fmt for fmt in EIGHT_BIT_SPLITS if fmt.min_subnormal and fmt.min_normal], ids=name_of)
def test_largest_subnormal_carries_into_smallest_normal(path, fmt):
    largest_subnormal = fmt.min_normal - fmt.min_subnormal
    x = torch.tensor([largest_subnormal + 0.49 * fmt.min_subnormal, largest_subnormal + 0.51 * fmt.min_subnormal])
    assert path(x, fmt).tolist() == [largest_subnormal, fmt.min_normal]


@every_path
@pytest.mark.parametrize("fmt", EIGHT_BIT_SPLITS, ids=name_of)
def test_subnormals_are_rounded_once(path, fmt):
    """Making subnormals by adding the smallest normal rounds to 24 bits first and hides what is below
    a tie."""
    tie = 1.5 * fmt.smallest
    x = torch.tensor([tie, 0.5 * fmt.smallest])
    x = torch.cat([torch.nextafter(x, torch.tensor(torch.inf)), x, torch.nextafter(x, torch.tensor(0.0))])
    assert path(x, fmt).tolist() == [round_scalar(v, fmt) for v in x.tolist()]


@every_path
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_every_kind_of_nan_stays_nan(path, fmt):
    """Adding to the bits turns NaN 0x7f800001 into Inf and 0x7fffffff into -0."""
    nans = patterns(0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7FBFFFFF, 0xFF800001, 0xFFFFFFFF, 0xFFC00000)
    assert path(nans, fmt).isnan().all()


@every_path
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_huge_values_and_infinities_saturate(path, fmt):
    """The classic magic number, 1.5 * 2^23 ulp, overflows for large x."""
    x = torch.tensor([torch.inf, 3.4028235e38, 3.0e38])
    expected = [fmt.max, fmt.max, min(3.0e38, fmt.max)]
    signed = path(torch.cat([x, -x]), fmt).double()
    assert torch.equal(signed[:2], torch.tensor(expected[:2], dtype=torch.float64))
    assert torch.equal(signed[3:5], -torch.tensor(expected[:2], dtype=torch.float64))
    assert signed.isfinite().all()


@every_path
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_sign_of_zero_survives_where_the_format_has_it(path, fmt):
    """A magic-number add returns +0 for -0 and for small negative values."""
    y = path(torch.tensor([-0.0, -fmt.smallest / 4, 0.0, fmt.smallest / 4]), fmt)
    assert (y == 0).all()
    assert torch.signbit(y).tolist() == [fmt.has_negative_zero, fmt.has_negative_zero, False, False]


@pytest.mark.parametrize("overflow", ["saturate", "overflow"])
def test_values_that_round_to_the_largest_are_in_range(overflow):
    """Clamping comes after rounding: 448 < x <= 464 is 448 in either policy."""
    x = torch.tensor([448.0, 450.0, 463.9, 464.0, -464.0])
    assert quantize(x, "E4M3", overflow=overflow).abs().eq(448.0).all()


def test_overflow_gives_infinity_where_there_is_one_and_nan_elsewhere():
    x = torch.tensor([1e9, -1e9, torch.inf, -torch.inf])
    assert quantize(x, "E5M2", overflow="overflow").tolist() == [torch.inf, -torch.inf, torch.inf, -torch.inf]
    assert quantize(x, "E4M3", overflow="overflow").isnan().all()
    assert quantize(x, "E3M4", overflow="overflow").isnan().all()


@pytest.mark.parametrize("name", ["E6M1", "E7M0", "E8M3IEEE", "BF16"])
def test_wide_exponents_survive_any_scale(name):
    """target / amax overflows float32 for tiny tensors unless the scale is limited."""
    fmt = get_format(name)
    for amax in (1e-45, 1e-38, 1.0, 1e30, 3.4e38):
        x = torch.tensor([amax, amax / 2, -amax, 0.0])
        scale = compute_scale(x.abs().max(), fmt)
        q = quantize(x, fmt, scale=scale)
        assert q.isfinite().all()
        assert q[0] >= amax * 0.6


def nearest_float32(exact: Fraction) -> np.float32:
    """Round once, ties to even."""
    guess = np.float32(float(exact))
    around = (np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf)))
    return min(around, key=lambda value: (abs(Fraction(float(value)) - exact), value.view(np.int32) & 1))


@pytest.mark.parametrize("fuse_root", [False, True])
@pytest.mark.parametrize("name", ["E3M4", "E4M3", "E5M2", "E7M0", "binary8p1", "E0M7"])
def test_a_compiler_may_fuse_the_products_that_feed_additions(name, fuse_root):
    """GPU compilers contract them into multiply-adds with one rounding; the kernel's sums stay the same."""
    fmt = get_format(name)
    constants = [np.float32(value) for value in packed_constants(fmt)]

    def fused(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
        return nearest_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))

    points = decision_points(fmt, stride=3)
    for x in points[(points > 0) & points.isfinite()].tolist():
        magnitude = min(np.float32(x), constants[MAX])
        ulp = fused(magnitude, np.float32(SUCCESSOR), magnitude) - magnitude
        spacing = max(ulp * constants[ULPS], constants[SPACING])
        square = np.sqrt(spacing) * np.sqrt(spacing)
        anchor = (
            fused(square, constants[ROOT], spacing * constants[ANCHOR])
            if fuse_root
            else fused(spacing, constants[ANCHOR], square * constants[ROOT])
        )
        assert (magnitude + anchor) - anchor == round_scalar(x, fmt)


@every_path
@pytest.mark.parametrize("fmt", EIGHT_BIT_SPLITS, ids=name_of)
def test_flushing_subnormals_changes_nothing_in_eight_bits(path, fmt):
    """GPUs and torch.set_flush_denormal may read float32 subnormals as zero, far below these values."""
    x = torch.cat([random_patterns(10_000), patterns(1, 0x7FFFFF, 0x80000001, 0x807FFFFF)])
    expected = path(x, fmt)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = path(x, fmt)
    finally:
        torch.set_flush_denormal(False)
    assert_identical(flushed, expected, x)
