"""Stochastic rounding decides as fractions decide, and operands are right on average.

Oracles: the format's sorted values and exact fractions; the mean over many streams. In the first tests the random
numbers are placed on either side of each element's share of the way, so that a bias of one float32 shows.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from altgrad.formats import Format, get_format
from altgrad.numerics import format_constants, operand_scale, quantize_operand
from altgrad.numerics.rounding import round_to_grid_stochastic
from tests.numerics.numerics_oracles import KERNEL_FORMATS, assert_identical, name_of

NARROW = [fmt for fmt in KERNEL_FORMATS if fmt.bits <= 12]  # whose values fit in a list


def inputs(fmt: Format) -> Tensor:
    """Return numbers in every binade of the format, on its values and between them, and beyond the largest one."""
    values = torch.tensor(fmt.values, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    shares = torch.rand(3, len(values) - 1, generator=generator, dtype=torch.float64)
    between = values[:-1] + shares * (values[1:] - values[:-1])
    special = torch.tensor([0.0, -0.0, 1.5 * fmt.max, -1.5 * fmt.max, torch.inf, -torch.inf])
    return torch.cat([values, between.flatten(), special]).float()


def shares_of_the_way(x: Tensor, fmt: Format) -> list[tuple[float, float, Fraction]]:
    """Return for each |x| the values at or below and above it (twice the largest beyond it), and its share between."""
    grid = np.array([value for value in fmt.values if value >= 0])
    found = []
    for magnitude in x.abs().double().clamp_max(fmt.max).tolist():
        place = int(np.searchsorted(grid, magnitude, side="right")) - 1
        below, above = float(grid[place]), float(grid[min(place + 1, len(grid) - 1)])
        way = Fraction(above) - Fraction(below)
        found.append((below, above, (Fraction(magnitude) - Fraction(below)) / way if way else Fraction(0)))
    return found


@pytest.mark.parametrize("fmt", NARROW, ids=name_of)
def test_a_number_goes_up_where_the_random_one_is_below_its_share_of_the_way(fmt: Format) -> None:
    x = inputs(fmt)
    ways = shares_of_the_way(x, fmt)
    share = torch.tensor([float(share) for *_, share in ways])
    assert [Fraction(s) for s in share.tolist()] == [way[2] for way in ways]  # float32 holds them exactly
    smallest, largest = torch.tensor(2.0**-24), torch.tensor(1 - 2.0**-24)
    beside = [torch.nextafter(share, torch.tensor(toward)) for toward in (0.0, 1.0)]
    for chosen in (share, *beside, torch.full_like(share, 0.5), smallest, largest):
        random = chosen.clamp(smallest, largest).expand_as(share)
        drawn = zip(ways, random.tolist(), strict=True)
        expected = torch.copysign(torch.tensor([up if Fraction(r) < s else down for (down, up, s), r in drawn]), x)
        if not fmt.has_negative_zero:
            expected = torch.where(expected == 0, 0.0, expected)
        assert_identical(round_to_grid_stochastic(x, format_constants(fmt), random), expected, x)


@pytest.mark.parametrize("fmt", NARROW, ids=name_of)
def test_a_value_of_the_format_and_nan_stay_whatever_is_drawn(fmt: Format) -> None:
    x, nan = torch.tensor(fmt.values).float(), torch.tensor([torch.nan, -torch.nan])
    for random in (2.0**-24, 0.5, 1 - 2.0**-24):
        assert torch.equal(round_to_grid_stochastic(x, format_constants(fmt), torch.full_like(x, random)), x)
        assert round_to_grid_stochastic(nan, format_constants(fmt), torch.full_like(nan, random)).isnan().all()


# --- operands --------------------------------------------------------------------------------------------------------

SCALINGS = {
    "tensor": {},
    "row": {"granularity": "row"},
    "MX blocks": {"granularity": "block", "block": 8, "scale_format": "E8M0"},
    "two levels": {"granularity": "block", "block": 16, "scale_format": "E4M3"},
}
STREAMS, ALIKE = 200, 20  # draws of a value: as many streams, and places in each that hold the same


def stream(step: int, number: int = 1) -> Tensor:
    return torch.tensor([3, number, step])


def x_of(rows: int = 6, columns: int = 40) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul(2.0).exp() - 1


def drawn(x: Tensor, name: str, scaling: dict[str, Any], which: Tensor) -> Tensor:
    """Return ``x`` rounded by chance, its scales taken off again."""
    constants = format_constants(name, scale_format=scaling.get("scale_format", "float32"))
    found = quantize_operand(x, constants, None, which, **scaling, dtype=torch.float32)
    return found.values if found.scale is None else found.values / found.scale


def neighbours(x: Tensor, name: str, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the format's values next to ``x * scale``, and that itself."""
    values = torch.tensor(sorted(set(get_format(name).values)), dtype=torch.float32)
    scaled = (x * scale).clamp(values[0], values[-1])
    place = torch.searchsorted(values, scaled, right=True).clamp(1, len(values) - 1)
    return values[place - 1], values[place], scaled


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["E2M1", "E4M3"])
def test_a_value_becomes_one_of_its_two_neighbours(name: str, dim: int, scaling: dict[str, Any]) -> None:
    x, options = x_of(), scaling | {"dim": dim}
    constants = format_constants(name, scale_format=scaling.get("scale_format", "float32"))
    scale = operand_scale(x, constants, **options).expand_as(x)
    below, above, scaled = neighbours(x, name, scale)
    for step in range(20):
        found = drawn(x, name, options, stream(step)) * scale
        near = lambda target: torch.isclose(found, target, rtol=1e-6, atol=0.0)  # noqa: B023,E731 # the scale is off and on
        assert (near(below) | near(above) | (scaled == found)).all()


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_it_is_right_on_average(scaling: dict[str, Any]) -> None:
    """And to nearest it is not: the same bound tells the two apart."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    constants = format_constants("E2M1", scale_format=scaling.get("scale_format", "float32"))
    scale = operand_scale(x, constants, **scaling).expand_as(x)
    below, above, scaled = neighbours(x, "E2M1", scale)
    # Of a value that is drawn with that probability; the second term where it hardly ever is.
    spread = ((scaled - below) * (above - scaled)).sqrt() / scale
    draws = STREAMS * ALIKE
    far = 5 * spread / draws**0.5 + 20 * (above - below) / scale / draws
    repeated = x.repeat(ALIKE, 1)
    total = sum(drawn(repeated, "E2M1", scaling, stream(step)).double() for step in range(STREAMS))
    mean = total.unflatten(0, (ALIKE, len(x))).sum(0) / draws
    reachable = scaled / scale  # blocks in E4M3 have values beyond their largest
    assert ((mean - reachable).abs() <= far).all()
    nearest = quantize_operand(x, constants, **scaling, dtype=torch.float32)
    nearest = nearest.values if nearest.scale is None else nearest.values / nearest.scale
    assert ((nearest - reachable).abs() > far).double().mean() > 0.5


def test_streams_differ_and_repeat() -> None:
    x = x_of()
    first = drawn(x, "E2M1", {}, stream(0))
    assert torch.equal(first, drawn(x, "E2M1", {}, stream(0)))
    assert not torch.equal(first, drawn(x, "E2M1", {}, stream(1)))
    assert not torch.equal(first, drawn(x, "E2M1", {}, stream(0, number=2)))


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_a_compiled_graph_draws_the_same(scaling: dict[str, Any]) -> None:
    x, constants = x_of(), format_constants("E2M1", scale_format=scaling.get("scale_format", "float32"))

    def both(x: Tensor, which: Tensor) -> Tensor:
        return quantize_operand(x, constants, None, which, **scaling, dtype=torch.float32).values

    compiled = torch.compile(both, dynamic=False)
    for step in range(3):
        assert torch.equal(compiled(x, stream(step)), both(x, stream(step)))
