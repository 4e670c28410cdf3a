"""The quantization grid as a line of integers, and rounding by chance.

Oracles: `rung`, `neighbours` and counted frequencies.
"""

import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import (
    at_coordinate,
    coordinate,
    format_constants,
    grid_spacing,
    neighbours,
    quantize,
    round_to_grid_stochastic,
    rung,
    ulp,
    uniform,
)

FORMATS = [*(f"E{e}M{7 - e}" for e in range(8)), "E4M3FN", "E5M2IEEE", "E2M1", "E3M2", "E4M3FNUZ"]


def stream(*parts: int) -> torch.Tensor:
    return torch.tensor(parts)


def grid(name: str) -> torch.Tensor:
    return torch.tensor(get_format(name).values, dtype=torch.float32)


def between(name: str, count: int = 20_000) -> torch.Tensor:
    """Return values of every size within the format's range, off its quantization grid as a rule."""
    generator = torch.Generator().manual_seed(0)
    values = grid(name)
    place = torch.randint(len(values) - 1, (count,), generator=generator)
    share = torch.rand(count, generator=generator)
    return values[place] + share * (values[place + 1] - values[place])


@pytest.mark.parametrize("name", FORMATS)
def test_a_representable_value_has_its_rung_for_a_coordinate(name):
    values, constants = grid(name), format_constants(name)
    u = coordinate(values, constants)
    assert torch.equal(u, rung(values, name).float())
    assert torch.equal(at_coordinate(u, constants), values)


@pytest.mark.parametrize("name", FORMATS)
def test_between_two_values_it_grows_linearly_and_leads_back(name):
    x, constants = between(name), format_constants(name)
    below, above = neighbours(x, name)
    low, high = coordinate(below, constants), coordinate(above, constants)
    inside = quantize(x, name) != x
    expected = low + (x - below) / (above - below)
    assert torch.allclose(coordinate(x, constants)[inside], expected[inside], rtol=1e-6, atol=1e-5)
    assert (high - low)[inside].eq(1).all()
    # A float32 coordinate of up to 127 rungs is good to 2^-18 rungs.
    back = at_coordinate(coordinate(x, constants), constants)
    assert ((back - x).abs() <= 2.0**-17 * ulp(x, name)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_beyond_the_largest_value_it_goes_on_with_the_spacing_there(name):
    fmt, constants = get_format(name), format_constants(name)
    top = torch.tensor([fmt.max, -fmt.max])
    step = ulp(top, name)
    beyond = top + torch.tensor([3.0, -3.0]) * step
    assert torch.equal(coordinate(beyond, constants), coordinate(top, constants) + torch.tensor([3.0, -3.0]))
    assert torch.equal(at_coordinate(coordinate(beyond, constants), constants), beyond)


@pytest.mark.parametrize("name", FORMATS)
def test_spacing_is_the_ulp(name):
    x, constants = between(name), format_constants(name)
    assert torch.equal(grid_spacing(x.abs(), constants), ulp(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_by_chance_ends_at_a_neighbour_and_leaves_representable_values_alone(name):
    x, constants = between(name), format_constants(name)
    found = round_to_grid_stochastic(x, constants, uniform(x.shape, stream(0, 1, 2)))
    below, above = neighbours(x, name)
    off = quantize(x, name) != x
    assert ((found == below) | (found == above))[off].all()
    values = grid(name)
    for random in (2.0**-24, 1 - 2.0**-24):
        assert torch.equal(round_to_grid_stochastic(values, constants, torch.full_like(values, random)), values)
    huge = torch.tensor([torch.inf, -torch.inf, 2 * get_format(name).max, torch.nan])
    found = round_to_grid_stochastic(huge, constants, torch.full((4,), 0.5))
    assert torch.equal(found[:3], torch.tensor([1.0, -1.0, 1.0]) * get_format(name).max) and found[3].isnan()


@pytest.mark.parametrize("name", ["E1M6", "E4M3", "E7M0"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_the_share_of_the_way_is_the_probability(name, share):
    values = grid(name)
    low, high = values[-3].item(), values[-2].item()
    x = torch.full((400_000,), low + share * (high - low))
    up = round_to_grid_stochastic(x, format_constants(name), uniform(x.shape, stream(0, 5, 6))) == high
    deviation = (share * (1 - share) / len(x)) ** 0.5
    assert abs(up.double().mean().item() - share) < 5 * deviation
