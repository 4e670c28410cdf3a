"""`round_to_grid_stochastic` decides as fractions decide. Oracle: the format's sorted values and exact fractions.

The random numbers are placed on either side of each element's share of the way, so that a bias of one float32 shows.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from altgrad.formats import Format
from altgrad.numerics import format_constants
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
def test_a_value_of_the_format_stays_whatever_is_drawn(fmt: Format) -> None:
    x = torch.tensor(fmt.values).float()
    for random in (2.0**-24, 0.5, 1 - 2.0**-24):
        assert torch.equal(round_to_grid_stochastic(x, format_constants(fmt), torch.full_like(x, random)), x)


def test_nan_stays_nan() -> None:
    x = torch.tensor([torch.nan, -torch.nan])
    assert round_to_grid_stochastic(x, format_constants("E3M4"), torch.tensor([0.1, 0.9])).isnan().all()
