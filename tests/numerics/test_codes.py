"""Codes, rungs, spacing, neighbours and coordinates, of formats and of their finer grids.

Oracles: the format's tables of codes and values, and exact float64 arithmetic on multiples of a spacing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import (
    at_coordinate,
    coordinate,
    decode,
    encode,
    format_constants,
    grid_spacing,
    neighbours,
    quantize,
    refined_constants,
    refined_format,
    round_to_grid,
    rung,
    ulp,
)
from altgrad.numerics.constants import MAX, TARGET
from altgrad.numerics.prove import decision_points
from tests.numerics.numerics_oracles import FORMATS, assert_identical, every_bfloat16, name_of

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=name_of)
SMALL = [f"E{e}M{7 - e}" for e in range(8)] + ["E2M1", "E4M3FNUZ", "E5M2FNUZ", "E3M4IEEE", "binary8p4e", "binary8p1f"]
every_small_format = pytest.mark.parametrize("fmt", [get_format(name) for name in SMALL], ids=name_of)


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
    if fmt.nan_code is not None:
        assert decode(encode(values[~numbers], fmt), fmt, torch.float64).isnan().all()
    assert_identical(values, torch.tensor(fmt.code_values), codes)


@every_format
def test_encoding_rounds_first_and_rungs_count_representable_values(fmt):
    x = wide_inputs(fmt)
    if fmt.rounds_in_float32:
        assert torch.equal(rung(x.float(), fmt), rung(x.float().double(), fmt))
    x = x[x.isfinite()]
    assert torch.equal(encode(x, fmt), encode(quantize(x, fmt), fmt))
    assert_identical(decode(encode(x, fmt), fmt, torch.float64), quantize(x, fmt), x)
    values = torch.tensor(fmt.values)
    rungs = rung(values, fmt)
    assert (rungs.diff() == 1).all() and rungs[values.abs().argmin()] == 0  # of the smallest, without a zero
    if fmt.signed:
        assert torch.equal(rung(-values, fmt), -rungs)


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
    inside = (below.isfinite() & above.isfinite()).numpy()
    between = np.searchsorted(fmt.values, above.numpy()[inside]) - np.searchsorted(fmt.values, below.numpy()[inside])
    assert (between == 1 + np.isin(x.numpy()[inside], fmt.values)).all()


def test_neighbours_of_the_ends_are_infinite_and_so_are_some_codes():
    below, above = neighbours(torch.tensor([31.0, -31.0, 100.0]), "E3M4")
    assert below.tolist() == [30.0, -torch.inf, 31.0]
    assert above.tolist() == [torch.inf, -30.0, torch.inf]
    infinite = torch.tensor([torch.inf, -torch.inf])
    for fmt, codes in (("E5M2", [0x7C, 0xFC]), ("binary8p3", [0x7F, 0xFF]), ("E4M3", [0x7E, 0xFE])):
        assert encode(infinite, fmt).tolist() == codes
    assert encode(torch.tensor([1e9]), "E5M2").tolist() == [0x7B]


def test_shapes_and_dtypes_are_as_stated():
    x = torch.randn(2, 3).bfloat16().t()
    results = encode(x, "E3M4"), encode(x, "BF16"), rung(x, "E3M4"), ulp(x, "E3M4"), *neighbours(x, "E3M4")
    assert [t.dtype for t in results[:4]] == [torch.uint8, torch.int16, torch.int32, torch.bfloat16]
    assert decode(results[0], "E3M4", torch.bfloat16).dtype == torch.bfloat16
    assert {t.shape for t in results} == {(3, 2)}
    for function in (encode, rung, ulp):
        assert function(torch.empty(0), "E3M4").shape == (0,) and function(torch.tensor(1.0), "E3M4").shape == ()
    long = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(0))  # more than a chunk, under vmap
    assert torch.equal(torch.func.vmap(lambda row: ulp(row, "E3M4"))(long), ulp(long, "E3M4"))


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
        (ValueError, "a power of two", lambda: refined_constants(get_format("E4M3"), 3)),
        (ValueError, "24 bits", lambda: refined_constants(get_format("FP16"), 256)),
    ],
)
def test_errors_name_the_argument(error, match, call):
    with pytest.raises(error, match=match):
        call()


# --- coordinates and finer grids -------------------------------------------------------------------------------------


def magnitudes(fmt, count: int = 20_000) -> torch.Tensor:
    """Return float32 magnitudes over the whole range of ``fmt`` and below it: even in log and in value."""
    lowest, generator = torch.tensor(fmt.smallest).log2() - 10, torch.Generator().manual_seed(1)
    share = torch.rand(count, generator=generator)
    logarithmic = torch.exp2(lowest + share * (torch.tensor(fmt.max).log2() - lowest)).clamp_max(fmt.max)
    return torch.cat([share * fmt.max, logarithmic, torch.tensor(fmt.magnitudes).float()])


@every_small_format
def test_a_coordinate_is_the_rung_and_linear_between_two_rungs(fmt):
    values, constants = torch.tensor(fmt.values).float(), format_constants(fmt)
    u = coordinate(values, constants)
    assert torch.equal(u, rung(values, fmt).float())
    assert torch.equal(at_coordinate(u, constants), values)
    x = magnitudes(fmt)
    x = torch.cat([x, -x])
    off = (quantize(x, fmt) != x) & (x.abs() < fmt.max)
    x = x[off]
    below, above = neighbours(x, fmt)
    low, high = coordinate(below, constants), coordinate(above, constants)
    assert torch.allclose(coordinate(x, constants), low + (x - below) / (above - below), rtol=1e-6, atol=1e-5)
    assert (high - low).eq(1).all()
    # A float32 coordinate of up to 127 rungs is good to 2^-18 rungs.
    assert ((at_coordinate(coordinate(x, constants), constants) - x).abs() <= 2.0**-17 * ulp(x, fmt)).all()
    top = torch.tensor([fmt.max, -fmt.max])  # beyond which it goes on with the spacing there
    beyond = top + torch.tensor([3.0, -3.0]) * ulp(top, fmt)
    assert torch.equal(coordinate(beyond, constants), coordinate(top, constants) + torch.tensor([3.0, -3.0]))
    assert torch.equal(at_coordinate(coordinate(beyond, constants), constants), beyond)


@every_small_format
def test_a_finer_grid_has_the_formats_range_and_a_fraction_of_its_spacing(fmt):
    x, coarse, fine = magnitudes(fmt), format_constants(fmt), refined_constants(fmt, 256)
    assert torch.equal(grid_spacing(x, coarse), ulp(x, fmt))
    for refinement in (2, 256):
        assert torch.equal(grid_spacing(x, refined_constants(fmt, refinement)) * refinement, ulp(x, fmt))
    assert fine[MAX] == coarse[MAX] and fine[TARGET] == coarse[TARGET]
    assert round_to_grid(torch.tensor([torch.inf, -torch.inf]), fine).tolist() == [fmt.max, -fmt.max]
    step = ulp(x, fmt).double() / 256
    rounded = round_to_grid(x, fine)
    assert torch.equal(rounded.double(), (x.double() / step).round() * step)  # half to even, as in the mantissa
    values = torch.tensor(fmt.values).float()
    assert torch.equal(round_to_grid(values, fine), values)
    assert torch.equal(coordinate(values, fine), 256 * coordinate(values, coarse))
    both = torch.cat([rounded, -rounded[rounded > 0]])
    assert torch.equal(decode(encode(both, refined_format(fmt, 256)), refined_format(fmt, 256)), both)


def test_one_step_per_rung_is_the_format():
    fmt = get_format("E4M3")
    assert refined_format(fmt, 1) == fmt and torch.equal(refined_constants(fmt, 1), format_constants(fmt))
