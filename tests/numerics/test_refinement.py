"""The refined quantization grid is the format's own with more rungs between its values.

Oracles: the format's table of values, and exact float64 arithmetic on multiples of a spacing.
"""

from __future__ import annotations

import pytest
import torch

from altgrad.formats import get_format
from altgrad.numerics import (
    coordinate,
    decode,
    encode,
    format_constants,
    grid_spacing,
    refined_constants,
    refined_format,
    round_to_grid,
    ulp,
)
from altgrad.numerics.constants import MAX, TARGET

EIGHT = tuple(f"E{e}M{7 - e}" for e in range(8))
OTHERS = ("E4M3FNUZ", "E5M2FNUZ", "E3M4IEEE", "E2M1", "binary8p4e", "binary8p1f")


def magnitudes(fmt: str, count: int = 20_000) -> torch.Tensor:
    """Return float32 magnitudes over the whole range of ``fmt`` and below it: even in log and in value."""
    own, generator = get_format(fmt), torch.Generator().manual_seed(1)
    lowest = torch.tensor(own.smallest).log2() - 10
    spread = torch.rand(count, generator=generator)
    even = spread * own.max
    logarithmic = torch.exp2(lowest + spread * (torch.tensor(own.max).log2() - lowest)).clamp_max(own.max)
    return torch.cat([even, logarithmic, torch.tensor(own.magnitudes).float()])


@pytest.mark.parametrize("fmt", EIGHT + OTHERS)
def test_the_spacing_is_the_formats_over_the_refinement(fmt):
    x, own = magnitudes(fmt), format_constants(fmt)
    for refinement in (2, 256):
        fine = refined_constants(get_format(fmt), refinement)
        assert torch.equal(grid_spacing(x, fine) * refinement, grid_spacing(x, own))
    assert torch.equal(grid_spacing(x, fine) * 256, ulp(x, fmt))


@pytest.mark.parametrize("fmt", EIGHT + OTHERS)
def test_the_range_and_the_scale_are_the_formats(fmt):
    own, fine = format_constants(fmt), refined_constants(get_format(fmt), 256)
    assert fine[MAX] == own[MAX] and fine[TARGET] == own[TARGET]
    assert round_to_grid(torch.tensor([torch.inf, -torch.inf]), fine).tolist() == [own[MAX].item(), -own[MAX].item()]


@pytest.mark.parametrize("fmt", EIGHT + OTHERS)
def test_rounding_is_to_the_nearest_of_256_steps_per_rung(fmt):
    x = magnitudes(fmt)
    step = ulp(x, fmt).double() / 256
    expected = (x.double() / step).round() * step  # half to even, as in the mantissa
    assert torch.equal(round_to_grid(x, refined_constants(get_format(fmt), 256)).double(), expected)


@pytest.mark.parametrize("fmt", EIGHT + OTHERS)
def test_every_value_of_the_format_stays_with_256_steps_to_the_next(fmt):
    values = torch.tensor(get_format(fmt).values).float()
    fine = refined_constants(get_format(fmt), 256)
    assert torch.equal(round_to_grid(values, fine), values)
    assert torch.equal(coordinate(values, fine), 256 * coordinate(values, format_constants(fmt)))


@pytest.mark.parametrize("fmt", EIGHT + OTHERS)
def test_codes_hold_every_value_of_the_refined_quantization_grid(fmt):
    on_grid = round_to_grid(magnitudes(fmt), refined_constants(get_format(fmt), 256))
    on_grid = torch.cat([on_grid, -on_grid[on_grid > 0]])
    codes = encode(on_grid, refined_format(get_format(fmt), 256))
    assert codes.dtype == torch.int16 or get_format(fmt).bits < 8
    assert torch.equal(decode(codes, refined_format(get_format(fmt), 256)), on_grid)


def test_one_step_per_rung_is_the_format():
    fmt = get_format("E4M3")
    assert refined_format(fmt, 1) == fmt and torch.equal(refined_constants(fmt, 1), format_constants(fmt))


@pytest.mark.parametrize(("fmt", "refinement", "words"), [("E4M3", 3, "a power of two"), ("FP16", 256, "24 bits")])
def test_what_has_no_refined_quantization_grid_is_refused(fmt, refinement, words):
    with pytest.raises(ValueError, match=words):
        refined_constants(get_format(fmt), refinement)
