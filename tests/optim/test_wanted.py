"""Where a step wants weights that live on their quantization grid, beside where it puts them.

Oracles: the step itself, which is at most a spacing away; its mean over random streams; plain AdamW for masters.
"""

from __future__ import annotations

import copy

import pytest
import torch

from altgrad.optim import ArmOptimizer
from tests.optim.arms import ARMS, arm_named, make, step

ON_GRID = [name for name, arm in ARMS.items() if arm["weights"] == "quantized"]
assert ON_GRID


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


@pytest.mark.parametrize("name", [name for name in ON_GRID if ARMS[name]["rounding"] == "stochastic" and (
    ARMS[name]["store"] == "float32")])  # what lies as codes has the same bits: tests/training/test_state_cells.py
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
