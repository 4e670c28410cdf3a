"""Weights on a quantization grid 256 times finer than the format that their arm sees.

The oracle is the same arm on the format's own quantization grid; `tests/optim/test_on_grid.py` tells what that does.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altgrad.formats import get_format
from altgrad.numerics import coordinate, format_constants, round_to_grid, ulp
from altgrad.optim import Arm, ArmOptimizer, WeightGrid, update_cpu
from tests.optim.arms import EXTREMES, OPTIONS, arm_named, grid_of, normal_weights, step

NO_DECAY = {"decay": 0.0, "plain_decay": 0.0}
ROUNDING = 2e-3  # of float32, in places of up to 254 rungs
EXACT = {"betas": (0.0, 0.0), "eps": 0.0}  # Adam's direction is then the gradient's sign


@pytest.fixture(params=["loops", "rules"])
def path(request, monkeypatch):
    """Take steps by the CPU's own loops, and by the rules."""
    if request.param == "rules":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    return request.param


def fine_grid_of(fmt: str) -> WeightGrid:
    held = torch.zeros(1)
    return WeightGrid(get_format(fmt), OPTIONS, remembered=lambda: held[0], held=held, refinement=256)


def both(arm: Arm, fmt: str, start: torch.Tensor) -> list[tuple[nn.Parameter, ArmOptimizer]]:
    """Return a weight on the format's quantization grid and a finer one, at ``start``, with their optimizers."""
    made = []
    for grid in (grid_of(fmt, arm), fine_grid_of(fmt)):
        weight = nn.Parameter(start.clone())
        made.append((weight, ArmOptimizer({weight: grid}, [], arm, seed=5)))
    assert torch.equal(made[0][0], made[1][0])
    return made


def values_of(fmt: str, count: int = 600) -> torch.Tensor:
    """Return weights (count,) on the quantization grid that their own amax makes."""
    weight = normal_weights((1, count), seed=2)[0].detach()[0]
    return WeightGrid(get_format(fmt), OPTIONS).on_grid(weight)


def places(weight: torch.Tensor, optimizer: ArmOptimizer) -> torch.Tensor:
    """Return each weight's coordinate on the format's own quantization grid."""
    (grid,) = optimizer.grids.values()
    return coordinate(weight.detach() * grid.scale(weight.detach()), format_constants(grid.format)).double()


@pytest.mark.parametrize("fmt", EXTREMES)
@pytest.mark.parametrize(("rungs", "moved"), [(1.0, 1), (3.0, 3), (20.0, 8)])
def test_whole_rungs_move_a_weight_as_far_whatever_they_lie_on(path, fmt, rungs, moved):
    """Eight at most, counted in the format's rungs, whatever the steps; beyond the largest value both stop there."""
    arm = arm_named("rung", lr=rungs, max_rungs=8, held_scale="fixed", **NO_DECAY, **EXACT)
    (coarse, by_rung), (fine, by_step) = both(arm, fmt, values_of(fmt))
    before = places(coarse, by_rung)
    sign = torch.where(torch.arange(coarse.numel()) % 2 == 0, 1.0, -1.0)
    for weight, optimizer in ((coarse, by_rung), (fine, by_step)):
        weight.grad = sign.clone()
        optimizer.step()
    top = coordinate(torch.tensor(get_format(fmt).max), format_constants(fmt))
    expected = (before - moved * sign).clamp(-top, top)
    torch.testing.assert_close(places(coarse, by_rung), expected, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(places(fine, by_step), expected, rtol=0, atol=1 / 256 + ROUNDING)


@pytest.mark.parametrize("fmt", EXTREMES)
def test_parts_of_a_rung_and_decay_are_the_same_on_average(path, fmt):
    """The noise of the format's quantization grid is at most half a rung in a step, of the finer one 256 times less."""
    arm = arm_named("rung", lr=0.37, **EXACT)
    start, moved = values_of(fmt, 200).repeat(1000, 1), []
    for weight, optimizer in both(arm, fmt, start):
        before = places(weight, optimizer)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved.append((places(weight, optimizer) - before).mean().item())
    assert abs(moved[0] - moved[1]) < 4 * 0.5 / start.numel() ** 0.5
    assert moved[1] == pytest.approx(-0.37, abs=0.03)  # which decay moves a little, as the weights' mean is not 0


@pytest.mark.parametrize("fmt", EXTREMES)
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_rung_is_as_wide_for_what_is_recorded(fmt, share):
    """Where the scale is that of a smaller amax, too: beyond the largest value a rung is as wide as there."""
    weight = normal_weights((24, 32))[0].detach()
    amax = weight.abs().amax() * share
    for refinement in (1, 256):
        grid = WeightGrid(get_format(fmt), OPTIONS, remembered=lambda: amax, refinement=refinement)
        scale = grid.scale(weight)
        assert torch.equal(grid.spacing(weight), ulp(weight * scale, fmt) / scale)


@pytest.mark.parametrize("fmt", EXTREMES)
@pytest.mark.parametrize("name", ["adamw_sr_weights", "spacing_unmatched_sr_weights"])
def test_a_step_is_that_of_master_weights_to_a_256th_of_a_rung(path, fmt, name):
    """The stiffness is the format's: without normalisation, that of the finer rungs would be 256 times less."""
    changes = {"lr": 1e-3} if name == "adamw_sr_weights" else {"lr": 0.5, "normalise": "none"}
    weight, grid = nn.Parameter(values_of(fmt)[None]), fine_grid_of(fmt)
    on_grid = ArmOptimizer({weight: grid}, [], arm_named(name, held_scale="fixed", **changes))
    amax, free = grid.held[0].clone(), nn.Parameter(weight.detach().clone())
    of_format = WeightGrid(get_format(fmt), OPTIONS, remembered=lambda: amax)
    master = ArmOptimizer({free: of_format}, [], arm_named(name, **changes, weights="master", rounding="nearest"))
    before = of_format.spacing(free.detach())
    for weights, optimizer in (([weight], on_grid), ([free], master)):
        step(weights, optimizer, seed=1)
    top = get_format(fmt).max / grid.scale(weight.detach())  # where a fixed scale ends
    wide = torch.maximum(before, of_format.spacing(free.detach()))
    assert ((weight - free.clamp(-top, top)).abs() <= wide / 256 + amax * 2**-22).all()
    assert not torch.equal(weight, free)
    scaled = (weight * grid.scale(weight)).detach()
    torch.testing.assert_close(scaled, round_to_grid(scaled, grid.constants), rtol=1e-6, atol=0)


@pytest.mark.parametrize("fmt", EXTREMES)
def test_codes_bring_back_every_bit(fmt):
    weight, grid = nn.Parameter(normal_weights((24, 32))[0].detach()), fine_grid_of(fmt)
    optimizer = ArmOptimizer({weight: grid}, [], arm_named("rung"))
    for i in range(4):
        step([weight], optimizer, seed=i)
        codes = grid.encode(weight)
        assert codes.dtype == torch.int16 and torch.equal(grid.decode(codes, weight), weight)
