"""Rounding against implementations that share no code with it.

gfloat on every bfloat16 input, exact fractions at every decision boundary and its float32 neighbours,
and the casts of ml_dtypes and torch, each where its overflow policy is one that we have: torch
saturates E4M3FN and sends E5M2 overflow to infinity; ml_dtypes gives NaN beyond E4M3FN's range.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

from altgrad.formats import Format, get_format
from altgrad.numerics import format_constants, quantize, round_to_grid
from altgrad.numerics.prove import decision_points
from altgrad.numerics.reference import round_scalar
from altgrad.numerics.rounding import OVERFLOW_POLICIES, round_float64
from tests.numerics.numerics_oracles import (
    DETERMINISTIC_MODES,
    FORMATS,
    GFLOAT_MODES,
    KERNEL_FORMATS,
    assert_identical,
    every_bfloat16,
    gfloat_round,
    name_of,
    random_patterns,
)

BFLOAT16 = every_bfloat16()


def by_fractions(x: torch.Tensor, fmt: Format, rounding: str = "nearest-even", overflow: str = "saturate"):
    results = [round_scalar(value, fmt, rounding, overflow) for value in x.double().tolist()]
    return torch.tensor(results, dtype=torch.float64)


def stride_for(fmt: Format, points: int) -> int:
    return max(1, len(fmt.magnitudes) // points)


@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_kernel_agrees_with_gfloat_on_every_bfloat16(fmt):
    assert_identical(round_to_grid(BFLOAT16, format_constants(fmt)), gfloat_round(BFLOAT16, fmt), BFLOAT16)


@pytest.mark.parametrize("rounding", [mode for mode in DETERMINISTIC_MODES if GFLOAT_MODES[mode] is not None])
@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_every_mode_agrees_with_gfloat_on_bfloat16(fmt, rounding):
    x = BFLOAT16[:: 1 if fmt.bits == 8 else 5]
    if not fmt.signed:  # gfloat passes values below the smallest through
        x = x[(x >= fmt.smallest) | x.isnan()]
    assert_identical(quantize(x.double(), fmt, rounding=rounding), gfloat_round(x, fmt, rounding), x)


@pytest.mark.parametrize("points", [256, pytest.param(1 << 16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_kernel_agrees_with_fractions_at_every_boundary(fmt, points):
    x = decision_points(fmt, stride_for(fmt, points))
    assert_identical(round_to_grid(x, format_constants(fmt)), by_fractions(x, fmt), x)


@pytest.mark.parametrize("rounding", DETERMINISTIC_MODES)
@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_every_mode_and_policy_agrees_with_fractions(fmt, rounding):
    """What is below the largest value, no policy can see: the first is tried everywhere, others from there on."""
    extremes = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 5e-324, -5e-324, 1.7e308, -1.7e308]
    x = torch.cat([decision_points(fmt, stride_for(fmt, 100)), random_patterns(200)]).double()
    x = torch.cat([x, torch.tensor(extremes, dtype=torch.float64)])
    for overflow in OVERFLOW_POLICIES:
        expected = by_fractions(x, fmt, rounding, overflow)
        assert_identical(quantize(x, fmt, rounding=rounding, overflow=overflow), expected, x)
        x = x[~(x.abs() < fmt.max)]
    assert len(x) > 2


@pytest.mark.parametrize("random_bits", [1, 5, 16, 31])
@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_stochastic_rounding_agrees_with_fractions_for_the_same_bits(fmt, random_bits):
    x = torch.cat([decision_points(fmt, stride_for(fmt, 30)).double(), random_patterns(200).double()])
    random = torch.randint(1 << random_bits, x.shape, generator=torch.Generator().manual_seed(0))
    ours = round_float64(x, fmt, "stochastic", "saturate", random, random_bits)
    pairs = zip(x.tolist(), random.tolist(), strict=True)
    theirs = [round_scalar(value, fmt, "stochastic", random=bits, random_bits=random_bits) for value, bits in pairs]
    assert_identical(ours, torch.tensor(theirs, dtype=torch.float64), x)


@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_stochastic_rounding_agrees_with_gfloat_for_the_same_bits(fmt):
    x = BFLOAT16[::7]
    random = torch.randint(1 << 10, x.shape, generator=torch.Generator().manual_seed(0))
    theirs = gfloat_round(x, fmt, "stochastic", srbits=random.numpy(), srnumbits=10)
    assert_identical(round_float64(x.double(), fmt, "stochastic", "saturate", random, 10), theirs, x)


def cast(dtype: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what casts to a dtype of torch, or of ml_dtypes and NumPy, and back."""
    if isinstance(dtype, torch.dtype):
        return lambda x: x.to(dtype).float()
    return lambda x: torch.from_numpy(x.numpy().astype(dtype).astype(np.float32))


# The last three have no way to say that a value was infinite or NaN.
CASTS = [
    ("E4M3", ml_dtypes.float8_e4m3fn, "overflow"), ("E5M2", ml_dtypes.float8_e5m2, "overflow"),
    ("E4M3FNUZ", ml_dtypes.float8_e4m3fnuz, "overflow"), ("E5M2FNUZ", ml_dtypes.float8_e5m2fnuz, "overflow"),
    ("E3M4IEEE", ml_dtypes.float8_e3m4, "overflow"), ("E4M3IEEE", ml_dtypes.float8_e4m3, "overflow"),
    ("BF16", ml_dtypes.bfloat16, "overflow"), ("FP16", np.float16, "overflow"),
    ("E4M3", torch.float8_e4m3fn, "saturate"), ("E5M2", torch.float8_e5m2, "overflow"),
    ("FP16", torch.float16, "overflow"), ("BF16", torch.bfloat16, "overflow"),
    ("E2M1", ml_dtypes.float4_e2m1fn, "saturate"), ("E2M3", ml_dtypes.float6_e2m3fn, "saturate"),
    ("E3M2", ml_dtypes.float6_e3m2fn, "saturate"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "overflow"), CASTS)
def test_policies_agree_with_the_casts_of_others(name, dtype, overflow):
    fmt = get_format(name)
    x = torch.cat([BFLOAT16, random_patterns(50_000), decision_points(fmt, stride_for(fmt, 1024))])
    x = x[x.isfinite()] if fmt.bits < 8 else x
    with np.errstate(invalid="ignore", over="ignore"):
        assert_identical(quantize(x, fmt, overflow=overflow), cast(dtype)(x), x)


def test_scale_format_rounds_as_torch_does_apart_from_ties():
    # Ties go to the even code here and in gfloat, up in torch; torch rounds all of 2^-127..2^-126 up.
    x = random_patterns(50_000)
    x = x[(x >= 2.0**-126) & (x <= 2.0**127)]
    ties = (x.view(torch.int32) & 0x7FFFFF) == 0x400000
    assert_identical(quantize(x, "E8M0")[~ties], x[~ties].to(torch.float8_e8m0fnu).float(), x[~ties])
