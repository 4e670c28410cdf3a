"""Laws of rounding, each for every format: on all 2^16 bfloat16 inputs, or on arbitrary float32."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from altgrad.formats import Format
from altgrad.numerics import format_constants, quantize, round_to_grid, ulp
from altgrad.numerics.prove import decision_points
from tests.numerics.numerics_oracles import (
    DETERMINISTIC_MODES,
    EIGHT_BIT_SPLITS,
    FORMATS,
    KERNEL_FORMATS,
    assert_identical,
    every_bfloat16,
    identical,
    name_of,
    random_patterns,
)

every_format = pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
NANS = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FBFFFFF, -0x7FFFFF, -1]).int().view(torch.float32)  # rare kinds
INPUTS = torch.cat([every_bfloat16(), random_patterns(20_000), NANS])


def rounded(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    return round_to_grid(x, format_constants(fmt))


@every_format
def test_results_are_on_the_quantization_grid(fmt):
    y = rounded(INPUTS, fmt)
    assert torch.isin(y[~y.isnan()].double(), torch.tensor(fmt.values)).all()


@every_format
def test_rounding_is_odd(fmt):
    # Where there is no -0, both zeros round to +0; adding 0 forgets the sign of zero.
    assert_identical(rounded(-INPUTS, fmt) + 0.0, -rounded(INPUTS, fmt) + 0.0, INPUTS)


@every_format
def test_error_is_at_most_half_an_ulp(fmt):
    x = INPUTS[INPUTS.abs() <= fmt.max].double()
    error = (rounded(x.float(), fmt).double() - x).abs()
    assert (error <= ulp(x, fmt) / 2).all()


@every_format
def test_nan_stays_nan_and_zero_keeps_its_sign_where_there_is_a_negative_zero(fmt):
    y = rounded(INPUTS, fmt)
    assert torch.equal(y.isnan(), INPUTS.isnan())
    zeros = y == 0
    negative = torch.signbit(INPUTS) if fmt.has_negative_zero else torch.zeros_like(zeros)
    assert torch.equal(torch.signbit(y)[zeros], negative[zeros])


@every_format
def test_rounding_commutes_with_powers_of_two(fmt):
    # On normal values only: below, the spacing does not scale along.
    if fmt.min_normal is None or fmt.min_normal * 4 > fmt.max:
        pytest.skip("no two binades of normal values")
    x = INPUTS[(INPUTS.abs() >= fmt.min_normal) & (INPUTS.abs() <= fmt.max / 2)]
    # With M = 0 ties go to the even exponent, a rule that only even powers of two preserve.
    power = 2.0 if fmt.mantissa_bits else 4.0
    x = x[x.abs() * power <= fmt.max]
    assert_identical(rounded(x * power, fmt), rounded(x, fmt) * power, x)


def test_uniform_formats_round_alike_up_to_a_power_of_two():
    x = INPUTS[INPUTS.abs() < 2.0**125]
    assert_identical(rounded(4 * x, EIGHT_BIT_SPLITS[1]), 4 * rounded(x, EIGHT_BIT_SPLITS[0]), x)


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


@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_directed_modes_bracket_the_value(fmt):
    x = INPUTS[INPUTS.double().abs() <= fmt.max].double()
    x = x if fmt.signed else x[x >= fmt.smallest]
    below, above = (quantize(x, fmt, rounding=mode) for mode in ("down", "up"))
    inward = quantize(x, fmt, rounding="toward-zero")
    assert ((below <= x) & (x <= above)).all()
    assert torch.equal(inward + 0.0, torch.where(x < 0, above, below) + 0.0)
    assert (above - below <= ulp(x, fmt)).all()


@pytest.mark.parametrize("fmt", EIGHT_BIT_SPLITS, ids=name_of)
def test_stochastic_rounding_is_unbiased(fmt):
    trials = 4000
    generator = torch.Generator().manual_seed(1)
    points = torch.tensor([0.0371, -0.26, 0.499, 0.75]) * min(fmt.max, 1.0)
    draws = quantize(points.expand(trials, 4), fmt, rounding="stochastic", generator=generator)
    # A draw is one of two neighbours, so its deviation is at most half their distance.
    deviation = ulp(points, fmt) / 2 / math.sqrt(trials)
    assert ((draws.double().mean(0) - points).abs() <= 4 * deviation).all()
    assert ((draws - points).abs() < ulp(points, fmt)).all()


without_clock = settings(deadline=None, database=None)


@without_clock
@given(st.floats(width=32), st.sampled_from(KERNEL_FORMATS))
def test_rounding_a_single_number_is_rounding_it_in_a_tensor(x, fmt):
    alone = rounded(torch.tensor(x), fmt)
    among = rounded(torch.tensor([1.0, x, -2.0] * 7), fmt)[1::3]
    assert identical(alone.expand(7), among).all()
