"""Laws of rounding that its oracles do not imply, for every format, on all bfloat16 and arbitrary float32 inputs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from altgrad.formats import Format, get_format
from altgrad.numerics import compute_scale, format_constants, quantize, round_to_grid
from altgrad.numerics.constants import ANCHOR, MAX, ROOT, SPACING, ULPS, packed_constants
from altgrad.numerics.prove import decision_points
from altgrad.numerics.reference import round_scalar
from altgrad.numerics.rounding import SUCCESSOR
from tests.numerics.numerics_oracles import (
    DETERMINISTIC_MODES,
    EIGHT_BIT_SPLITS,
    FORMATS,
    KERNEL_FORMATS,
    assert_identical,
    every_bfloat16,
    name_of,
    random_patterns,
)

every_format = pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
NANS = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FBFFFFF, -0x7FFFFF, -1]).int().view(torch.float32)  # rare kinds
INPUTS = torch.cat([every_bfloat16(), random_patterns(20_000), NANS])


def rounded(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return round_to_grid(x, format_constants(fmt))


@every_format
def test_eager_chunks_and_general_path_give_the_bits_of_the_kernel(fmt):
    inputs = torch.cat([INPUTS, decision_points(fmt, stride=1 + len(fmt.magnitudes) // 4096)])
    kernel = rounded(inputs, fmt)
    assert torch.equal(kernel.isnan(), inputs.isnan())
    assert_identical(quantize(inputs, fmt), kernel, inputs)
    assert_identical(quantize(inputs.double(), fmt), kernel, inputs)


@pytest.mark.parametrize("rounding", DETERMINISTIC_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_every_mode_is_monotone_idempotent_and_fixes_representable_values(fmt, rounding):
    ordered = INPUTS[~INPUTS.isnan()].sort().values[::3].double()
    if not fmt.signed:
        ordered = ordered[ordered >= 0]
    once = quantize(ordered, fmt, rounding=rounding)
    assert (once.diff() >= 0).all()
    assert_identical(quantize(once, fmt, rounding=rounding), once, ordered)
    values = torch.tensor(fmt.values)
    assert_identical(quantize(values, fmt, rounding=rounding), values, values)


# --- mistakes that published quantizers make, each as the case that shows it ------------------------------------------

PATHS = {
    "kernel": lambda x, fmt: round_to_grid(x, format_constants(fmt)),
    "eager": quantize,
    "general": lambda x, fmt: quantize(x.double(), fmt).float(),
}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def patterns(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).int().view(torch.float32)


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
