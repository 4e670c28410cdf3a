"""Formats that are a table, against other libraries, their papers' definitions, and exact arithmetic."""

from __future__ import annotations

from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from altgrad.formats import Format, from_definition, get_format
from altgrad.formats.format import in_float32
from altgrad.formats.registry import definition
from altgrad.formats.tables import TABLES

SIGN = 0x80


def points(fmt: Format) -> np.ndarray:
    """Return the values and thresholds of ``fmt`` with their float64 neighbours, and numbers of all sizes."""
    near = np.concatenate([fmt.values, fmt.thresholds])
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(5000) * np.exp2(rng.integers(-40, 40, 5000))
    return np.concatenate([near, np.nextafter(near, -np.inf), np.nextafter(near, np.inf), spread])


def rounded(x: np.ndarray, fmt: Format) -> np.ndarray:
    return fmt.values[np.searchsorted(fmt.thresholds, x, side="right")]


def test_hifloat8_is_that_of_its_makers():
    hifloat8 = pytest.importorskip("en_dtypes").hifloat8
    fmt = get_format("HIF8")
    codes = np.arange(256, dtype=np.uint8).view(hifloat8).astype(np.float64)
    np.testing.assert_array_equal(fmt.code_values, codes)
    x = np.concatenate([points(fmt), np.arange(1 << 16, dtype=np.uint32) << 16]).astype(np.float32)
    x = np.concatenate([x, (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)])
    with np.errstate(all="ignore"):
        theirs = x[np.isfinite(x)].astype(hifloat8).astype(np.float64)
    ours = rounded(x[np.isfinite(x)].astype(np.float64), fmt)
    in_range = np.abs(x[np.isfinite(x)]) < 40960
    np.testing.assert_array_equal(ours[in_range], theirs[in_range])
    assert np.isinf(theirs[~in_range]).all() and (np.abs(ours[~in_range]) == fmt.max).all()


@pytest.mark.parametrize(("name", "make"), [("POSIT8", ("posit_2", {"x": 8})), ("POSIT8_0", ("posit8", {}))])
def test_posits_are_those_of_softposit(name, make):
    softposit, fmt = pytest.importorskip("softposit"), get_format(name)
    kind, fixed = getattr(softposit, make[0]), make[1]
    x = points(fmt)
    theirs = [float(kind(value=float(number), **fixed) if fixed else kind(float(number))) for number in x]
    np.testing.assert_array_equal(rounded(x, fmt), theirs)


def takum_of_bits(text: str) -> Fraction:
    """Return the value of 12 bits or more by arXiv:2404.18603, definition 2, which has one formula for both signs."""
    s, d, r = int(text[0]), int(text[1]), int(text[2:5], 2)
    length = r if d else 7 - r
    tail = text[5:].ljust(length, "0")
    c = 2**length - 1 + int("0" + tail[:length], 2) if d else -(2 ** (length + 1)) + 1 + int("0" + tail[:length], 2)
    fraction = Fraction(int("0" + tail[length:], 2), 2 ** len(tail[length:]))
    return (1 - 3 * s + fraction) * Fraction(2) ** ((-1) ** s * (c + s))


def test_takums_are_those_of_the_papers_formula():
    fmt = get_format("TAKUM8")
    by_code = {code: takum_of_bits(f"{code:08b}0000") for code in range(256) if code not in (0, SIGN)}
    assert {code: Fraction(x) for code, x in enumerate(fmt.code_values) if code in by_code} == by_code
    codes = [code for code, _ in sorted(by_code.items(), key=lambda pair: pair[1])]
    for low, high in pairwise(codes):
        if 0 in {(low + 1) % 256, (high - 1) % 256}:
            continue  # zero lies between
        between = takum_of_bits(f"{(2 * low + 1) % 512:09b}000")
        limit = fmt.thresholds[np.searchsorted(fmt.values, float(by_code[high])) - 1]
        assert limit == (between if high % 2 == 0 else np.nextafter(float(between), np.inf)), (low, high)


def test_logarithmic_values_are_the_nearest_float32_to_the_powers():
    fmt = get_format("LNS8")
    with localcontext(prec=60):
        for code in set(range(128)) - {0x40}:
            exact = Decimal(2) ** (Decimal((code ^ 0x40) - 0x40) / 8)
            near = np.nextafter(np.float32(fmt.code_values[code]), np.array([-np.inf, np.inf], np.float32))
            off = abs(Decimal(fmt.code_values[code]) - exact)
            assert all(off < abs(Decimal(float(other)) - exact) for other in near)
            assert fmt.code_values[code | SIGN] == -fmt.code_values[code]
    assert fmt.code_values[0x40] == 0


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    offset = 0.9677083  # bitsandbytes' create_normal_map
    quantile = np.vectorize(NormalDist().inv_cdf)
    above, below = (quantile(np.linspace(offset, 0.5, count)[:-1]) for count in (9, 8))
    values = np.sort(np.concatenate([above, [0.0], -below]))
    np.testing.assert_allclose(get_format("NF4").values, values / values.max(), atol=2e-6)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_in_order_and_survives_a_file(name):
    fmt = get_format(name)
    values, limits = fmt.values, fmt.thresholds
    assert (np.diff(values) > 0).all() and (np.diff(limits) > 0).all()
    assert ((values[:-1] < limits) | (limits == 0)).all() and (limits <= values[1:]).all()
    assert np.array_equal(np.sort(fmt.code_values[np.isfinite(fmt.code_values)]), values)
    for one in (fmt, fmt.scaled_to("2 of rms")):
        assert from_definition(definition(one)) == one and hash(one) == hash(from_definition(definition(one)))
    narrow, thresholds = in_float32(values, limits)
    if fmt.fits(24, -149, 127):
        x = points(fmt)[np.abs(points(fmt)) <= 3e38].astype(np.float32)
        ours = narrow[np.searchsorted(thresholds, x, side="right")]
        np.testing.assert_array_equal(ours, rounded(x.astype(np.float64), fmt))


numbers = st.lists(st.integers(-(1 << 20), 1 << 20), min_size=2, max_size=60, unique=True).filter(lambda n: max(n) > 0)


@given(numbers, st.sampled_from(["even", "away", "up"]), st.data())
def test_own_values_round_to_the_nearest(integers, ties, data):
    values = sorted(x / 1024 for x in integers)
    fmt = Format.of_values("mine", values, ties=ties)
    low, high = data.draw(st.sampled_from(list(pairwise(values))))
    middle = (low + high) / 2
    below, above = (rounded(np.nextafter(middle, end), fmt) for end in (-np.inf, np.inf))
    assert (below, above) == (low, high)
    place = values.index(high)
    up = {"even": place % 2 == 0, "away": middle >= 0, "up": True}[ties]
    assert rounded(np.float64(middle), fmt) == (high if up else low)
    assert list(fmt.code_values[: len(values)]) == values


def test_a_symmetric_table_has_a_sign_bit_and_one_zero():
    fmt = Format.of_values("mine", [0, 1, 2, 4, 8], symmetric=True)
    assert fmt.values.tolist() == [-8, -4, -2, -1, 0, 1, 2, 4, 8] and fmt.bits == 4
    assert fmt.code_values[:5].tolist() == [0, 1, 2, 4, 8] and fmt.code_values[9:13].tolist() == [-1, -2, -4, -8]
    assert rounded(np.array([1.5, -1.5, 3.0, -3.0]), fmt).tolist() == [2, -2, 2, -2]  # to codes 2, 10, 2, 10
    assert Format.of_values("mine", [1, 2], symmetric=True).values.tolist() == [-2, -1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": [1]}, "values: expected at least two numbers, got 1"),
        ({"values": [0, 1, 1, 2]}, "values: 1 and 1, number 2 and 3, are not in ascending order, each once"),
        ({"values": [0, 2, 1]}, "values: 2 and 1, number 2 and 3, are not in ascending order"),
        ({"values": [0, 1, 1 + 1e-9]}, "values: 1 and 1, number 2 and 3, are the same float32"),
        ({"values": [0, float("inf")]}, "values: inf is no finite float32"),
        ({"values": [0, 1e39]}, "values: 1e[+]39 is no finite float32"),
        ({"values": [-2, -1]}, "values: expected a positive number, and the largest is -1"),
        ({"values": [-1, 1], "symmetric": True}, "symmetric: -1 is negative"),
        ({"values": ["a"]}, "values: expected numbers"),
        ({"values": range((1 << 16) + 1)}, "values: 65,537 take 17 bits, at most 16 are supported"),
        ({"values": [0, 1], "ties": "odd"}, "ties: expected one of even, away, up, got 'odd'"),
        ({"values": [0, 1], "scale_to": "top"}, "scale_to: expected max, a number from"),
        ({"values": [0, 1], "scale_to": "max of rms"}, "scale_to: expected max"),
        ({"values": [0, 1], "scale_to": -1}, "scale_to: expected max"),
    ],
)
def test_mistakes_in_a_table_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Format.of_values("mine", **arguments)


def test_integers_have_their_usual_names():
    assert get_format("INT8") == get_format("E0M7")
    assert get_format("INT4").values.tolist() == [i / 8 for i in range(-7, 8)]
