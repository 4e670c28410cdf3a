"""Formats: the published ranges, and that every code decodes as gfloat and ml_dtypes decode it."""

from __future__ import annotations

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest

from altgrad.formats import FloatFormat, UnknownFormatError, get_format
from altgrad.numerics.reference import largest_code, magnitude_of_code
from tests.numerics.numerics_oracles import FORMATS, gfloat_format, name_of

# name, specials, bias, max, smallest normal, smallest subnormal, distinct finite values
PUBLISHED = [
    ("E0M7", "finite", None, 127 / 128, None, 2.0**-7, 255),
    ("E1M6", "finite", 0, 3.96875, 2.0, 2.0**-5, 255),
    ("E2M5", "finite", 1, 7.875, 1.0, 2.0**-5, 255),
    ("E3M4", "finite", 3, 31.0, 2.0**-2, 2.0**-6, 255),
    ("E4M3", "fn", 7, 448.0, 2.0**-6, 2.0**-9, 253),
    ("E5M2", "ieee", 15, 57344.0, 2.0**-14, 2.0**-16, 247),
    ("E6M1", "finite", 31, 1.5 * 2.0**32, 2.0**-30, 2.0**-31, 255),
    ("E7M0", "finite", 63, 2.0**64, 2.0**-62, None, 255),
    ("E3M4IEEE", "ieee", 3, 15.5, 2.0**-2, 2.0**-6, 223),
    ("E4M3IEEE", "ieee", 7, 240.0, 2.0**-6, 2.0**-9, 239),
    ("E4M3FNUZ", "fnuz", 8, 240.0, 2.0**-7, 2.0**-10, 255),
    ("E5M2FNUZ", "fnuz", 16, 57344.0, 2.0**-15, 2.0**-17, 255),
    ("E2M1", "finite", 1, 6.0, 1.0, 0.5, 15),
    ("E2M3", "finite", 1, 7.5, 1.0, 0.125, 63),
    ("E3M2", "finite", 3, 28.0, 0.25, 0.0625, 63),
    ("FP16", "ieee", 15, 65504.0, 2.0**-14, 2.0**-24, 63487),
    ("BF16", "ieee", 127, 2.0**128 - 2.0**120, 2.0**-126, 2.0**-133, 65279),
    ("binary8p3", "p3109", 16, 49152.0, 2.0**-15, 2.0**-17, 253),
    ("binary8p4e", "p3109", 8, 224.0, 2.0**-7, 2.0**-10, 253),
    ("binary8p4f", "fnuz", 8, 240.0, 2.0**-7, 2.0**-10, 255),
]

ML_DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E3M4IEEE": ml_dtypes.float8_e3m4,
    "E4M3IEEE": ml_dtypes.float8_e4m3,
    "E8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16,
    "FP16": np.float16,
    "E2M1": ml_dtypes.float4_e2m1fn,
    "E2M3": ml_dtypes.float6_e2m3fn,
    "E3M2": ml_dtypes.float6_e3m2fn,
}


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal numbers with equal signs, zeros included; NaN has no sign."""
    np.testing.assert_array_equal(ours, theirs)
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(ours[numbers]), np.signbit(theirs[numbers]))


def decode_scalar(code: int, fmt: FloatFormat) -> float:
    """Return the value of one code, specials included."""
    magnitude_bits = fmt.exponent_bits + fmt.mantissa_bits
    sign, magnitude = divmod(code, 2**magnitude_bits)
    if sign and magnitude == 0 and fmt.specials in ("fnuz", "p3109"):
        return math.nan
    if magnitude <= largest_code(fmt):
        value = float(magnitude_of_code(magnitude, fmt))
    elif fmt.has_inf and magnitude == largest_code(fmt) + 1:
        value = math.inf
    else:
        value = math.nan
    return -value if sign else value


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda row: row[0])
def test_range_is_the_published_one(published):
    name, specials, bias, largest, min_normal, min_subnormal, count = published
    fmt = get_format(name)
    assert fmt.specials == specials
    assert bias is None or fmt.bias == bias
    assert fmt.max == largest
    assert fmt.min_normal == min_normal
    assert fmt.min_subnormal == min_subnormal
    assert len(fmt.values) == count == len(np.unique(fmt.values))
    assert fmt.emin == (0 if name == "E0M7" else 1 - fmt.bias)


@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_every_code_has_its_defined_value(fmt):
    codes = np.arange(0, 2**fmt.bits, 1 if fmt.bits <= 8 else 37)
    defined = np.array([decode_scalar(int(code), fmt) for code in codes])
    assert_same(fmt.code_values[codes], defined)
    assert fmt.max == magnitude_of_code(largest_code(fmt), fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_every_code_decodes_as_in_gfloat(fmt):
    theirs = gfloat.decode_ndarray(gfloat_format(fmt), np.arange(2**fmt.bits))
    assert_same(fmt.code_values, theirs)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name):
    fmt = get_format(name)
    codes = np.arange(2**fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)
    with np.errstate(invalid="ignore"):  # numpy warns of a signalling NaN
        assert_same(fmt.code_values, codes.view(ML_DTYPES[name]).astype(np.float64))


@pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
def test_values_are_the_distinct_finite_codes_in_order_and_cannot_be_written_to(fmt):
    finite = fmt.code_values[np.isfinite(fmt.code_values)]
    np.testing.assert_array_equal(fmt.values, np.unique(finite))
    assert fmt.max == fmt.values[-1]
    assert fmt.smallest == fmt.values[fmt.values > 0][0]
    assert 2.0**fmt.emax <= fmt.max < 2.0 ** (fmt.emax + 1)
    assert np.isinf(fmt.code_values).any() == fmt.has_inf
    assert np.isnan(fmt.code_values).any() == (fmt.nan_code is not None)
    assert fmt.nan_code is None or np.isnan(fmt.code_values[fmt.nan_code])
    assert fmt.inf_code is None or fmt.code_values[fmt.inf_code] == np.inf
    for table in (fmt.values, fmt.magnitudes, fmt.code_values):
        assert not table.flags.writeable


@pytest.mark.parametrize(
    ("alias", "name"),
    [("E4M3FN", "E4M3"), ("E5M10", "FP16"), ("E8M7", "BF16"), ("binary8p1", "binary8p1e"),
     *((name, name) for name in ("E5M2IEEE", "E6M9", "E3M12", "E9M6", "E0M1", "E7M8IEEE"))],
)  # fmt: skip
def test_a_name_is_an_alias_or_any_split_of_up_to_16_bits(alias, name):
    fmt = get_format(alias)
    assert fmt.name == name and get_format(fmt) is fmt
    assert f"E{fmt.exponent_bits}M{fmt.mantissa_bits}" in name or alias != name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("e4m3", "E4M3"),
        ("bf16", "BF16"),
        ("E4M3FNU", "E4M3FN"),
        ("E3M", "E3M4"),
        ("E3M4 ", "E3M4"),
        ("E03M4", "E3M4"),
        ("binary8p9", "binary8p8"),
        ("int8", "INT8"),
        ("", "E<exponent bits>M<mantissa bits>"),
        ("E9M9", "19 bits"),
        ("E0M0", "no number"),
        ("E12M2", "float64"),
    ],
)
def test_unknown_names_are_refused_with_near_matches(name, hint):
    with pytest.raises(UnknownFormatError, match="unknown format") as caught:
        get_format(name)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("name", {"name": ""}),
        ("exponent_bits", {"exponent_bits": -1}),
        ("exponent_bits", {"exponent_bits": 2.5}),
        ("exponent_bits", {"exponent_bits": True}),
        ("exponent_bits", {"exponent_bits": 10**9}),
        ("exponent_bits", {"mantissa_bits": 12}),
        ("mantissa_bits", {"mantissa_bits": -2}),
        ("mantissa_bits", {"exponent_bits": 0, "mantissa_bits": 0}),
        ("mantissa_bits", {"exponent_bits": 0, "mantissa_bits": 1, "specials": "fn"}),
        ("bias", {"bias": 0.5}),
        ("bias", {"bias": 5000}),
        ("bias", {"bias": -5000}),
        ("specials", {"specials": "none"}),
        ("specials", {"specials": "ieee", "mantissa_bits": 0}),
        ("signed", {"signed": 1}),
        ("signed", {"signed": False, "specials": "ieee"}),
    ],
)
def test_invalid_fields_are_named(field, change):
    fields = {"name": "mine", "exponent_bits": 4, "mantissa_bits": 3, "bias": None, "specials": "finite"}
    with pytest.raises(ValueError, match=rf"^{field}: "):
        FloatFormat(**fields | change)


def test_the_bias_may_be_set_and_a_name_is_a_string():
    assert FloatFormat("mine", 4, 3).bias == 7
    np.testing.assert_array_equal(FloatFormat("mine", 4, 3, bias=9).values, FloatFormat("mine", 4, 3).values / 4)
    with pytest.raises(TypeError, match="name"):
        get_format(8)


def test_the_scaling_target_of_a_tiny_format_is_its_largest_value():
    fmt = FloatFormat("tiny", 4, 3, bias=130)
    assert fmt.scale_target == fmt.max < 2.0**-64
