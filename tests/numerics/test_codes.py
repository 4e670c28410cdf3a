"""Codes, rungs, spacing and neighbours, against the scalar definitions and by their own laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import decode, encode, neighbours, quantize, rung, ulp
from altgrad.numerics.prove import decision_points
from altgrad.numerics.reference import encode_scalar, rung_scalar
from tests.numerics.numerics_oracles import FORMATS, KERNEL_FORMATS, assert_identical, every_bfloat16, name_of

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=name_of)


def wide_inputs(fmt):
    x = torch.cat([every_bfloat16()[::5].double(), decision_points(fmt, max(1, len(fmt.magnitudes) // 1000)).double()])
    x = x[~x.isnan()]
    return x if fmt.signed else x[x >= 0]


@every_format
def test_every_code_survives_the_round_trip(fmt):
    codes = torch.arange(2**fmt.bits).to(torch.uint8 if fmt.bits <= 8 else torch.int16)
    values = decode(codes, fmt, torch.float64)
    numbers = ~values.isnan()
    assert torch.equal(encode(values[numbers], fmt), codes[numbers])
    if fmt.has_nan:
        assert decode(encode(values[~numbers], fmt), fmt, torch.float64).isnan().all()
    assert_identical(values, torch.tensor(fmt.code_values), codes)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.bits <= 8], ids=name_of)
def test_codes_and_rungs_agree_with_the_scalar_definitions(fmt):
    """For every seventh code, of both signs: the definitions look through all of them each time."""
    values = torch.tensor(fmt.code_values)
    values = values[~values.isnan()][::7]
    assert encode(values, fmt).tolist() == [encode_scalar(value, fmt) for value in values.tolist()]
    values = values[values.isfinite()]
    assert rung(values, fmt).tolist() == [rung_scalar(value, fmt) for value in values.tolist()]


@every_format
def test_encoding_rounds_first(fmt):
    x = wide_inputs(fmt)
    x = x[x.isfinite()]
    assert torch.equal(encode(x, fmt), encode(quantize(x, fmt), fmt))
    assert_identical(decode(encode(x, fmt), fmt, torch.float64), quantize(x, fmt), x)


@every_format
def test_rungs_count_representable_values(fmt):
    values = torch.tensor(fmt.values)
    rungs = rung(values, fmt)
    assert (rungs.diff() == 1).all()
    if fmt.has_zero:
        assert rungs[values == 0] == 0
    if fmt.signed:
        assert torch.equal(rung(-values, fmt), -rungs)


@pytest.mark.parametrize("fmt", KERNEL_FORMATS, ids=name_of)
def test_float32_and_float64_give_the_same_integers(fmt):
    x = wide_inputs(fmt).float()
    assert torch.equal(rung(x, fmt), rung(x.double(), fmt))
    assert torch.equal(encode(x, fmt), encode(x.double(), fmt))


@every_format
def test_ulp_is_the_distance_to_the_next_value_outwards(fmt):
    magnitudes = torch.tensor(fmt.magnitudes)
    spacing = ulp(magnitudes[:-1], fmt)
    if fmt.mantissa_bits == 0 and fmt.has_zero:  # at zero the smallest value, from there on the value itself
        spacing = torch.where(magnitudes[:-1] == 0, fmt.smallest, spacing)
    assert torch.equal(magnitudes.diff(), spacing)
    assert ulp(torch.tensor(torch.inf, dtype=torch.float64), fmt) == ulp(magnitudes[-1], fmt)
    assert ulp(torch.tensor(torch.nan, dtype=torch.float64), fmt).isnan()


@every_format
def test_neighbours_enclose_and_nothing_lies_between(fmt):
    x = wide_inputs(fmt)
    below, above = neighbours(x, fmt)
    assert ((below < x) | (x == -torch.inf)).all()
    assert ((above > x) | (x == torch.inf)).all()
    values = fmt.values
    inside = (below.isfinite() & above.isfinite()).numpy()
    between = np.searchsorted(values, above.numpy()[inside]) - np.searchsorted(values, below.numpy()[inside])
    on_grid = np.isin(x.numpy()[inside], values)
    assert (between == 1 + on_grid).all()


def test_neighbours_of_the_ends_are_infinite():
    below, above = neighbours(torch.tensor([31.0, -31.0, 100.0]), "E3M4")
    assert below.tolist() == [30.0, -torch.inf, 31.0]
    assert above.tolist() == [torch.inf, -30.0, torch.inf]


def test_shapes_and_dtypes_are_as_stated():
    x = torch.randn(2, 3).bfloat16().t()
    assert encode(x, "E3M4").dtype == torch.uint8
    assert encode(x, "BF16").dtype == torch.int16
    assert rung(x, "E3M4").dtype == torch.int32
    assert ulp(x, "E3M4").dtype == torch.bfloat16
    assert decode(encode(x, "E3M4"), "E3M4", torch.bfloat16).dtype == torch.bfloat16
    for result in (encode(x, "E3M4"), rung(x, "E3M4"), ulp(x, "E3M4"), *neighbours(x, "E3M4")):
        assert result.shape == (3, 2)
    for function in (encode, rung, ulp):
        assert function(torch.empty(0), "E3M4").shape == (0,)
        assert function(torch.tensor(1.0), "E3M4").shape == ()


def test_infinities_take_the_infinity_code_or_saturate():
    x = torch.tensor([torch.inf, -torch.inf])
    assert encode(x, "E5M2").tolist() == [0x7C, 0xFC]
    assert encode(x, "binary8p3").tolist() == [0x7F, 0xFF]
    assert encode(x, "E4M3").tolist() == [0x7E, 0xFE]
    assert encode(torch.tensor([1e9]), "E5M2").tolist() == [0x7B]


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (ValueError, "^x: NaN has no code in E3M4", lambda: encode(torch.tensor([torch.nan]), "E3M4")),
        (ValueError, "^x: NaN has no rung", lambda: rung(torch.tensor([torch.nan]), "E4M3")),
        (ValueError, "^x: NaN has no neighbours", lambda: neighbours(torch.tensor([torch.nan]), "E4M3")),
        (TypeError, "^codes: ", lambda: decode(torch.ones(2), "E3M4")),
        (TypeError, "^codes: ", lambda: decode(torch.ones(2, dtype=torch.bool), "E3M4")),
        (ValueError, "^codes: E2M1 has codes 0 to 15", lambda: decode(torch.tensor([16]), "E2M1")),
        (ValueError, "^codes: ", lambda: decode(torch.tensor([-1]), "E3M4")),
        (ValueError, "^dtype: ", lambda: decode(torch.tensor([1]), "E7M0", torch.float16)),
        (TypeError, "^dtype: ", lambda: decode(torch.tensor([1]), "E3M4", torch.int32)),
        (TypeError, "^x: ", lambda: ulp(torch.tensor([1]), "E3M4")),
        (ValueError, "^x: ", lambda: neighbours(torch.ones(2).half(), "E7M0")),
    ],
)
def test_errors_name_the_argument(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_crossing_zero_counts_each_value_once():
    fmt = get_format("E3M4")
    steps = rung(torch.tensor(2 * fmt.smallest), fmt) - rung(torch.tensor(-fmt.smallest), fmt)
    assert steps == 3


def test_vmap_over_more_than_a_chunk_is_the_whole():
    x = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.func.vmap(lambda row: ulp(row, "E3M4"))(x), ulp(x, "E3M4"))
