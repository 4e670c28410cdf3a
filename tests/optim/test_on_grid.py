"""Weights that an optimizer keeps on the quantization grid: write-back, the held scale, and where a step wants them.

Oracles of `wanted`: the step itself, at most a spacing away; its mean over random streams.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from altgrad.formats import get_format
from altgrad.numerics import quantize, rung, ulp
from altgrad.optim import Arm, ArmOptimizer, update_cpu
from altgrad.optim.weight_grid import CodeWeight, plain
from tests.optim.arms import ARMS, EXTREMES, FORMATS, ON_GRID, arm_named, grid_of, make, step


@pytest.mark.parametrize("fmt", EXTREMES)
@pytest.mark.parametrize("name", ON_GRID)
@pytest.mark.parametrize("scale", ["fixed", "reestimated"])
def test_weights_are_always_on_the_quantization_grid(fmt, name, scale):
    weights, optimizer = make(arm_named(name, held_scale=scale), fmt)
    grid = optimizer.grids[weights[0]]
    held = grid.held.item()
    for i in range(6):
        on_grid = weights[0].detach() * grid.scale(weights[0])
        assert torch.allclose(on_grid, quantize(on_grid, fmt), rtol=1e-6)
        assert torch.equal(grid.decode(grid.encode(weights[0]), weights[0]), weights[0])
        step(weights, optimizer, seed=i)
    assert scale == "reestimated" or grid.held.item() == held
    assert grid.encode(weights[0]).dtype == torch.uint8


@pytest.mark.parametrize("fmt", [*FORMATS, "E2M1", "E3M2"])
def test_codes_in_memory_stand_for_their_weights_at_any_scale(compiler, fmt):
    """Also where a weight times its scale falls short of the value that it is; a step that moves none keeps them."""
    arm = arm_named("rung", decay=0.0, held_scale="fixed").but(store="codes")
    for amax in torch.linspace(0.3, 0.7, 23):
        grid = grid_of(fmt, arm)
        weight = nn.Parameter(torch.zeros(1, 256))
        values = torch.tensor(get_format(fmt).values, dtype=torch.float32)
        grid.held.fill_(amax)
        weight.data = (values / grid.scale(weight)).expand(1, -1).clone()
        values = weight.detach().clone()
        assert torch.equal(grid.from_stored(grid.to_stored(values)), values)
        optimizer = ArmOptimizer({weight: grid}, [], arm)  # which holds the largest weight as it is
        weight.grad = torch.zeros_like(values)
        before = plain(weight.detach())
        optimizer.step()
        assert isinstance(weight, CodeWeight) and weight.memory.steps_in_codes
        assert torch.equal(plain(weight.detach()), before)


def test_the_quantization_grid_grows_and_shrinks_by_powers_of_two():
    arm = arm_named("adamw_sr_weights", lr=1.0, rounding="nearest", decay=0.0)
    weight = nn.Parameter(torch.tensor([[0.5, -1.0, 0.25, 0.125]]))
    _, optimizer = make(arm, "E3M4", [weight])
    held = optimizer.grids[weight].held
    assert held.item() == 1
    weight.grad = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    optimizer.step()  # -1 to -2, beyond the quantization grid, which has grown by then
    assert held.item() == 2 and weight.tolist() == [[0.5, -2.0, 0.25, 0.125]]
    for _ in range(6):
        weight.grad = -weight.sign() * torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        weight.data[0, 1] = 0.0
        weight.data[0, 0] = 0.0
        optimizer.step()
    assert math.log2(held.item()) == int(math.log2(held.item()))


@pytest.mark.parametrize("by_loops", [True, False])
@pytest.mark.parametrize("name", ["adamw_sr_weights", "rung"])
@pytest.mark.parametrize(
    ("present", "held"),
    [(1.0, 1.0), (0.5, 1.0), (0.25, 1.0), (0.2421875, 0.5), (0.125, 0.5), (0.0, 0.5), (1.03125, 2.0), (8.0, 2.0)],
)
def test_the_scale_follows_when_it_is_due_and_not_before(monkeypatch, request, name, by_loops, present, held):
    """Halved below a quarter of the largest value, doubled above it, once a step; or fixed."""
    if by_loops:
        request.getfixturevalue("compiler")
    else:
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    for scale, expected in (("reestimated", held), ("fixed", 1.0)):
        weight = nn.Parameter(torch.tensor([[1.0, 0.0]]))
        _, optimizer = make(arm_named(name, held_scale=scale, decay=0.0, rounding="stochastic"), "E3M4", [weight])
        grid = optimizer.grids[weight]
        assert grid.held.item() == 1 and bool(optimizer._loops) == by_loops
        weight.data[0, 0] = present
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert grid.held.item() == expected
        end = 2.0 if scale == "reestimated" else 1.0
        assert abs(weight[0, 0].item() - min(present, end)) <= end / 31  # a rung at the most


@pytest.mark.parametrize("fmt", ["E1M6", "E4M3", "E5M2"])
def test_selective_write_back_draws_only_where_nearest_would_lose_the_step(fmt):
    """Beside the other two roundings of the same step, and the spacing by codes."""
    ends, lr = {}, 0.1  # steps of some 0.05 to 10 spacings
    for rounding in ("nearest", "stochastic", "selective"):
        arm = Arm(base="sgd", lr=lr, weights="quantized", rounding=rounding, held_scale="fixed")
        weights, optimizer = make(arm, fmt)
        start, grid = weights[0].detach().clone(), optimizer.grids[weights[0]]
        step(weights, optimizer, seed=1)
        ends[rounding] = weights[0].detach()
    (wanted,), plain = make(Arm(base="sgd", lr=lr), fmt, [nn.Parameter(start.clone())])
    step([wanted], plain, seed=1)
    scale = grid.held.new_tensor(grid.format.max) / grid.held
    small = (wanted.detach() - start).abs() < ulp(start * scale, fmt) / scale / 2
    assert 0.02 < small.float().mean() < 0.98
    assert ends["selective"].equal(torch.where(small, ends["stochastic"], ends["nearest"]))
    assert (ends["stochastic"] != ends["nearest"])[~small].any()


@pytest.mark.parametrize("fmt", FORMATS)
def test_rung_moves_whole_rungs_and_at_most_so_many(fmt):
    arm = arm_named("rung", lr=3.0, max_rungs=2, decay=0.0, held_scale="fixed")
    weights, optimizer = make(arm, fmt)
    grid = optimizer.grids[weights[0]]
    before = rung(weights[0] * grid.scale(weights[0]), fmt)
    step(weights, optimizer, seed=0)
    moved = rung(weights[0] * grid.scale(weights[0]), fmt) - before
    top = before.abs() >= before.abs().max() - 2
    assert moved.abs().max() == 2 and (moved[~top].abs() == 2).all()  # the first step of Adam is the sign
    assert (moved[~top].sign() == -weights[0].grad[~top].sign()).all()


@pytest.mark.parametrize("name", ON_GRID)
def test_weights_that_all_begin_at_zero_get_a_scale(name):
    weights = [nn.Parameter(torch.zeros(24, 32))]
    weights, optimizer = make(arm_named(name), weights=weights)
    for i in range(3):
        step(weights, optimizer, seed=i)
    (grid,) = optimizer.grids.values()
    assert weights[0].isfinite().all() and weights[0].count_nonzero() > 700
    assert grid.held.item() >= weights[0].abs().max().item() > 0
    assert torch.equal(grid.on_grid(weights[0].detach()), weights[0])


# --- what a step wants -------------------------------------------------------------------------------


def gradient(p: torch.Tensor, seed: int) -> torch.Tensor:
    return 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ON_GRID)
def test_a_step_puts_weights_next_to_where_it_wants_them_and_asking_changes_nothing(name):
    runs = []
    for asked in (False, True):
        (p,), optimizer = make(arm_named(name))
        for i in range(4):
            before = p.detach().clone()
            p.grad = gradient(p, i)
            wanted = optimizer.wanted(p) if asked else None
            optimizer.step()
            if wanted is not None:
                assert not torch.equal(wanted, before)
                grid = optimizer.grids[p]
                apart = (p - wanted).abs() / torch.maximum(grid.spacing(p), grid.spacing(wanted))
                assert apart.max() <= (0.5 if optimizer.arm.rounding == "nearest" else 1) + 1e-3
        runs.append((p.detach(), copy.deepcopy(optimizer.state_dict()["state"])))
    (plain, state), (watched, kept) = runs
    assert torch.equal(plain, watched)
    for name in state[0]:
        assert torch.equal(state[0][name], kept[0][name])


@pytest.mark.parametrize(
    "name", [name for name in ON_GRID if ARMS[name]["rounding"] == "stochastic" and (ARMS[name]["store"] == "float32")]
)  # what lies as codes has the same bits: tests/training/test_state_cells.py
def test_by_chance_a_step_goes_where_it_wants_on_average(name):
    found = []
    for seed in range(400):
        (p,), optimizer = make(arm_named(name), seed=seed)
        p.grad = gradient(p, 0)
        wanted = optimizer.wanted(p)
        optimizer.step()
        found.append((p.detach() - wanted) / optimizer.grids[p].spacing(p))
    error = torch.stack(found).mean(dim=0)  # of each weight, at most 0.5 / sqrt(400) give or take
    inside = wanted.abs() < 0.98 * p.abs().max()  # the largest cannot go up
    assert error[inside].abs().max() < 0.15 and abs(error[inside].mean()) < 0.01


def test_masters_go_where_they_want():
    (p,), optimizer = make(arm_named("adamw"))
    assert isinstance(optimizer, ArmOptimizer)
    step([p], optimizer, seed=0)
    p.grad = gradient(p, 1)
    assert optimizer.wanted(p) is None
