"""Rounding to a table's values: loops, tensor operations and compiled graphs against its thresholds and fractions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from altgrad.formats import Format, get_format
from altgrad.numerics import (
    at_coordinate,
    coordinate,
    decode,
    decode_operand,
    encode,
    encode_operand,
    format_constants,
    grid_spacing,
    loops,
    quantize,
    quantize_operand,
    round_to_grid,
    rung,
    ulp,
)
from altgrad.numerics.constants import SPACING, TARGET, loops_take, refined_constants, table_of
from altgrad.numerics.operand_definition import block_code, quantize_by_tensors
from altgrad.numerics.prove import MODES, check_decision_points, rounder
from altgrad.numerics.rounding import round_to_grid_stochastic
from altgrad.numerics.scaling import rms, scale_rule
from tests.numerics.numerics_oracles import TABLES_IN_FLOAT32, name_of, spread

OWN = [
    Format.of_values("own", [0, 0.1, 0.2, 0.5, 1, 3], symmetric=True),
    Format.of_values("lopsided", [-3, -0.5, 0.25, 1, 7], ties="away"),
    Format.of_values("crowded", [-1, 0, *(1.3 + k * 2**-22 for k in range(3)), 2]),  # two thresholds in a bucket
    Format.of_values("wide", [x / 3 for x in range(700)], symmetric=True),  # more than a look-up has
]
FORMATS = [*TABLES_IN_FLOAT32, *OWN]
over_formats = pytest.mark.parametrize("fmt", FORMATS, ids=name_of)


def points(fmt: Format) -> torch.Tensor:
    """Return values, thresholds and their float32 neighbours, numbers of all sizes, and what is not finite."""
    near = torch.cat([torch.tensor(fmt.values), torch.tensor(fmt.thresholds)]).float()
    ends = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, torch.nan])
    around = [torch.nextafter(near, end.expand_as(near)) for end in ends[:2]]
    return torch.cat([near, *around, ends, spread((4096,), binades=12.0)])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(0.123, 1e38, -1e38), b.nan_to_num(0.123, 1e38, -1e38)) and torch.equal(
        a.isnan(), b.isnan()
    )


@over_formats
def test_every_path_rounds_by_the_thresholds(fmt):
    x, constants = points(fmt), format_constants(fmt)
    assert loops_take(constants) == (fmt.name not in ("crowded", "wide"))
    values, thresholds = torch.tensor(fmt.values), torch.tensor(fmt.thresholds)
    wanted = values[torch.bucketize(x.double(), thresholds, right=True)]
    table = table_of(constants)
    wanted = torch.where(x.isnan(), x, wanted.clamp(table.values[0], table.values[-1]).float())
    assert same(torch.where(x.isnan(), x, table.values[table.place(x)]), wanted)
    assert same(round_to_grid(x, constants), wanted)
    assert same(quantize(x, fmt), wanted)
    if fmt.fits(53, -1074, 1023) and fmt.name != "TAKUM8":
        assert same(quantize(x.double(), fmt), wanted.double())


@over_formats
def test_compiled_rounding_is_eager_rounding(fmt):
    x, constants = points(fmt), format_constants(fmt)
    torch._dynamo.reset()
    assert same(torch.compile(round_to_grid, fullgraph=True)(x, constants), round_to_grid(x, constants))


def test_a_table_ends_half_of_its_last_spacing_beyond_either_end():
    few, unsigned = Format.of_values("few", [-1, 0, 4]), Format.of_values("unsigned", [1, 2, 8])
    x = torch.tensor([-1.5, -1.49, 5.99, 6.0])
    assert same(quantize(x, few, overflow="overflow"), torch.tensor([torch.nan, -1, 4, torch.nan]))
    x = torch.tensor([0.5, 0.51, 10.99, 11.0])
    assert same(quantize(x, unsigned, overflow="overflow"), torch.tensor([torch.nan, 1, 8, torch.nan]))


@pytest.mark.parametrize("mode", MODES)
@over_formats
def test_each_mode_is_that_of_fractions(fmt, mode):
    if fmt.name == "TAKUM8" and mode != "nearest-even":
        with pytest.raises(ValueError, match="float32 cannot hold all values of TAKUM8"):
            quantize(torch.ones(1), fmt, rounding=mode)
        return
    for overflow in ("saturate", "overflow"):
        count, wrong = check_decision_points(rounder(fmt, mode, overflow, "eager"), fmt, mode, overflow)
        assert count > 2 * len(fmt.values) and not wrong, (overflow, wrong[:3])


def test_hifloat8_overflows_where_its_makers_do():
    x = torch.tensor([32768.0, 40959.0, 40960.0, -40960.0, torch.inf])
    assert quantize(x, "HIF8").tolist() == [32768, 32768, 32768, -32768, 32768]
    assert quantize(x, "HIF8", overflow="overflow").tolist() == [32768, 32768, torch.inf, -torch.inf, torch.inf]


def test_posits_never_round_to_zero_or_beyond_the_largest():
    x = torch.tensor([1e-12, -1e-30, 1e9, torch.inf, 0.0, -0.0])
    assert quantize(x, "POSIT8").tolist() == [2**-24, -(2**-24), 2**24, 2**24, 0, 0]
    assert quantize(x[3:4], "POSIT8", overflow="overflow").isnan().all()


@over_formats
def test_codes_places_and_coordinates_agree(fmt):
    constants = format_constants(fmt)
    x = points(fmt)
    x = x[x.isfinite()]
    on_grid = quantize(x, fmt)
    assert torch.equal(decode(encode(x, fmt), fmt), on_grid)
    assert torch.equal(at_coordinate(coordinate(on_grid, constants), constants), on_grid)
    if fmt.has_bytes:
        assert torch.equal(decode_operand(encode_operand(on_grid, constants), constants, torch.float32), on_grid)
    if fmt.name == "TAKUM8":  # whose rungs count values that no float32 reaches
        return
    places = np.searchsorted(fmt.values, on_grid.double().numpy()) - np.searchsorted(fmt.values, 0.0)
    assert np.array_equal(rung(x, fmt).numpy(), places)
    assert torch.equal(coordinate(on_grid, constants), rung(x, fmt).float())
    assert torch.equal(ulp(x, fmt).float(), torch.from_numpy(fmt.spacing(x.double().numpy())).float())
    torch.testing.assert_close(grid_spacing(x, constants), ulp(x, fmt))


def test_the_codes_are_those_of_the_standards():
    x = torch.tensor([1.0, -1.0, 0.0, 2.0**-24, torch.nan])
    assert encode(x, "POSIT8").tolist() == [0x40, 0xC0, 0x00, 0x01, 0x80]
    assert encode(torch.tensor([1.0, -1.0, torch.inf, -torch.inf, torch.nan]), "HIF8").tolist() == [
        0x08, 0x88, 0x6F, 0xEF, 0x80,
    ]  # fmt: skip
    assert encode(torch.tensor([1.0, 2.0, 0.5]), "TAKUM8").tolist() == [0x40, 0x48, 0x38]


@over_formats
def test_stochastic_rounding_takes_the_share_of_the_way(fmt):
    constants = format_constants(fmt)
    values = table_of(constants).values[: len(fmt.values)]
    nearer = torch.where(values[1:] <= 0, values[1:], values[:-1])
    farther = torch.where(values[1:] <= 0, values[:-1], values[1:])
    x = nearer + (farther - nearer) * 0.25
    inside = (x != nearer) & (nearer * farther >= 0) & (farther - nearer).isfinite()
    for random, ends in ((0.24, farther), (0.26, nearer)):
        found = round_to_grid_stochastic(x, constants, torch.full_like(x, random))
        assert torch.equal(found[inside], ends[inside]), random


@pytest.mark.parametrize("statistic", ["amax", "rms"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"granularity": "row"}, {"granularity": "row", "dim": 0}, {"granularity": "block", "scale_format": "E8M0"},
        {"granularity": "block", "dim": 0, "scale_format": "E8M0"}, {"granularity": "block"}, {"granularity": "tile"},
        {"granularity": "tile", "scale_format": "E8M0", "scale_rounding": "even"},
        {"granularity": "block", "block": 16, "scale_format": "E4M3"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["POSIT8", "HIF8", "LNS8", "own", "crowded"])
def test_operands_are_those_of_the_definition(name, options, statistic):
    fmt = next((own for own in OWN if own.name == name), None) or get_format(name)
    scale_format = options.get("scale_format", "float32")
    if statistic == "rms" and scale_format == "E4M3":
        return
    constants = format_constants(fmt, scale_format=scale_format)
    settings = {"granularity": "tensor", "block": 32, "dim": 1, "scale_format": "float32"} | options
    block, dim = block_code(settings["granularity"], settings["block"]), settings["dim"]
    rule = scale_rule(settings["scale_format"], options.get("scale_rounding", "rceil"), settings["granularity"])
    for dtype in (torch.float32, torch.bfloat16):
        x = spread((70, 48), binades=3.0).to(dtype)
        made = torch.bfloat16 if fmt.fits(8, -133, 127) and scale_format != "E4M3" else torch.float32
        wanted = quantize_by_tensors(x, constants, None, block, dim, rule, made, statistic=statistic)
        found = quantize_operand(x, constants, dtype=made, statistic=statistic, **options)
        assert torch.equal(found.values, wanted[0])
        assert found.scale is None or torch.equal(found.scale, wanted[1])


def test_an_rms_is_that_of_float64():
    x = spread((70, 48), binades=3.0)
    wide = x.double().numpy()
    assert rms(x).item() == np.float32(np.sqrt((wide**2).mean()))
    np.testing.assert_array_equal(rms(x, "row", dim=1)[:, 0], np.sqrt((wide**2).mean(1)).astype(np.float32))
    blocks = [np.sqrt((wide[:, i : i + 32] ** 2).mean(1)).astype(np.float32) for i in (0, 32)]
    np.testing.assert_allclose(rms(x, "block", dim=1), np.stack(blocks, 1), rtol=1e-7)
    assert quantize_operand(x, format_constants("POSIT8"), statistic="rms").scale == 1 / rms(x)
    x[3, 4] = torch.inf
    assert quantize_operand(x, format_constants("POSIT8"), statistic="rms").values.isnan().all()


def test_a_refined_table_lies_between_the_values():
    coarse, fine = format_constants("POSIT8"), refined_constants(get_format("POSIT8"), 4)
    x = spread((999,))
    halves = coordinate(round_to_grid(x, fine), coarse) * 4
    assert torch.equal(halves, halves.round())
    torch.testing.assert_close(grid_spacing(x, fine) * 4, grid_spacing(x, coarse))


@over_formats
def test_constants_have_the_spacing_at_the_target(fmt):
    """Which the scale rule `even` reads: loops and kernels from the constants, tensor operations from the table."""
    refined = [] if fmt.name in ("crowded", "wide") else [refined_constants(fmt, 4)]  # which have no room for more
    for constants in (format_constants(fmt), format_constants(fmt.scaled_to(0.3)), *refined):
        assert constants[SPACING] == grid_spacing(constants[TARGET], constants)


def test_a_table_is_no_format_of_scales():
    with pytest.raises(ValueError, match="scale_format: POSIT8 is a table of values"):
        format_constants("E2M1", scale_format="POSIT8")


@pytest.mark.skipif(not loops.available(), reason="no C++ compiler")
def test_a_table_without_a_look_up_takes_tensor_operations():
    crowded = OWN[2]
    assert table_of(format_constants(crowded)).values.numel() == 512
    low, middle, high = crowded.values[2:5].tolist()
    assert quantize(torch.tensor([1.29, low, middle, high, 1.4]), crowded).tolist() == [low, low, middle, high, high]
