"""Weights without masters whose momentum makes up for rounding (ECO), and what is lost without.

Oracle: the same steps on master weights. What a weight has got and what its momentum will still bring it must be that
of the master weight, whatever was rounded on the way.
"""

import math

import pytest
import torch
from torch import nn

from altgrad.optim import Arm, ArmOptimizer
from altgrad.optim.update import unbias_later
from tests.optim.arms import arm_named, grid_of, normal_weights

SGD = {"base": "sgd", "momentum": 0.9, "betas": Arm(lr=1, base="sgd").betas}  # in place of eco's
BASES = {"adamw": {}, "sgd": SGD}


def pair(base: str, fmt: str = "E1M6", **changes) -> list[tuple[nn.Parameter, ArmOptimizer]]:
    """Return a weight with feedback and a master weight, both at the same values, and their optimizers."""
    shared = {"decay": 0.0, **BASES[base], **changes}
    eco = arm_named("eco", held_scale="fixed", **shared)
    free = eco.but(weights="master", feedback=None, rounding="nearest", held_scale="reestimated")
    (weight,) = normal_weights((30, 40))
    weight.data[0, 0] = 0.5  # the largest value, far from where anything goes
    optimizer = ArmOptimizer({weight: grid_of(fmt, eco)}, [], eco)
    master = nn.Parameter(weight.detach().clone())
    return [(weight, optimizer), (master, ArmOptimizer({master: grid_of(fmt, free)}, [], free))]


def rung_of(optimizer: ArmOptimizer, weight: torch.Tensor) -> torch.Tensor:
    (grid,) = optimizer.grids.values()
    return grid.spacing(weight.detach())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("step", [1, 2, 10, 500])
def test_coming_bias_corrections_are_their_sum(beta, step):
    """Against the sum itself, over as many steps as a momentum lasts."""
    if beta == 0:
        assert unbias_later(beta, step) == 1
        return
    terms = (beta ** (k - 1) / (1 - beta ** (step + k)) for k in range(1, 1 + int(40 / -math.log(beta))))
    assert unbias_later(beta, step) == pytest.approx((1 - beta) * math.fsum(terms), rel=1e-7)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["E1M6", "E3M4"])
@pytest.mark.parametrize("base", BASES)
def test_what_a_weight_has_and_will_get_is_that_of_the_master_weight(base, fmt, rounding):
    """Gradients of one size, so that Adam's second moment stays as it is; after every step, to float32's rounding."""
    lr, size = {"adamw": 1e-4, "sgd": 1e-3}[base], 0.01
    runs = pair(base, fmt, lr=lr, rounding=rounding)
    generator = torch.Generator().manual_seed(1)
    for i in range(1, 31):
        gradient = torch.where(torch.rand(30, 40, generator=generator) < 0.4, -size, size)
        gradient[0, 0] = size  # away from the end
        ends, places = [], []
        for weight, optimizer in runs:
            weight.grad = gradient.clone()
            optimizer.step()
            state = optimizer.state[weight]
            m = state.get("momentum_buffer", state.get("exp_avg")).double()
            rate = lr if base == "sgd" else lr / (size + 1e-8) * unbias_later(0.9, i)
            ends.append(weight.detach().double() - rate * 0.9 / (1 - 0.9) * m)
            places.append(weight.detach().clone())
        assert torch.allclose(*ends, rtol=0, atol=1e-6 * places[0].abs().max().item())
    assert not torch.equal(*places)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("base", BASES)
def test_on_a_quadratic_weights_follow_the_masters_where_rounding_alone_stalls(base, rounding):
    """Steps of an eighth of a rung or less, over many rungs; gradients are those at the weights themselves.

    On average within a rung if rounded stochastically. Rounded to nearest, a weight stays while less than half a rung
    of momentum waits, which would bring ``beta / (1 - beta)`` times as much: so far it may be behind.
    """
    runs, wanted = pair(base, lr=5e-4, rounding=rounding), normal_weights((30, 40), seed=7, std=0.1)[0].detach()
    naive = runs[0][1].arm.but(feedback=None, rounding="nearest")
    lost = nn.Parameter(runs[0][0].detach().clone())
    runs.append((lost, ArmOptimizer({lost: grid_of("E1M6", naive)}, [], naive)))
    rung, start = rung_of(runs[0][1], runs[0][0]), lost.detach().clone()
    inside = torch.ones_like(lost, dtype=torch.bool)
    inside[0, 0] = False  # the largest value, which is to stay
    for _ in range(250):
        for weight, optimizer in runs:
            weight.grad = torch.where(inside, weight.detach() - wanted, 0.0)
            optimizer.step()
        off = (((runs[0][0] - runs[1][0]).detach() / rung) * (wanted - start).sign())[inside]
        if rounding == "stochastic":
            assert off.mean().abs() < 0.25 and off.abs().mean() < 1
        else:
            assert off.abs().max() < 0.5 * 0.9 / (1 - 0.9)
    way = ((runs[1][0].detach() - start) / rung)[inside].abs()
    assert way.mean() > 14 and torch.equal(lost, start)


def test_what_lies_beyond_the_largest_value_is_no_error():
    """A fixed scale, and a gradient that goes on: the momentum is what it would be without feedback."""
    (weight, optimizer), _ = pair("sgd", lr=0.1)
    m = 0.0
    for _ in range(20):
        weight.grad = torch.zeros_like(weight)
        weight.grad[0, 0] = -1.0
        optimizer.step()
        m = 0.9 * m - 1.0
    assert weight[0, 0].item() == 0.5
    assert optimizer.state[weight]["momentum_buffer"][0, 0].item() == pytest.approx(m, rel=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_a_rate_of_zero_brings_nothing_back_and_does_no_harm(base):
    (weight, optimizer), _ = pair(base, lr=1e-3)
    for rate in (1e-3, 0.0, 1e-3):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.full_like(weight, 0.01)
        weight.data[3] = 0.0
        optimizer.step()
    assert weight.isfinite().all() and all(t.isfinite().all() for t in optimizer.state[weight].values())


@pytest.mark.parametrize("fmt", ["E1M6", "E3M4"])
def test_decay_is_kept_where_rounding_alone_would_lose_it(fmt):
    """But for what the momentum still holds, as on the quadratic."""
    found = {}
    for feedback in ("momentum", None):
        arm = arm_named("eco", decay=5e-3, feedback=feedback)
        (weight,) = normal_weights((50, 60))
        optimizer = ArmOptimizer({weight: grid_of(fmt, arm)}, [], arm)
        start, rung = weight.detach().clone(), rung_of(optimizer, weight)
        for _ in range(300):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        found[feedback] = (weight.detach() - (1 - 5e-3) ** 300 * start).abs() / rung
    assert found["momentum"].max() < 0.5 * 0.9 / (1 - 0.9) and found[None].mean() > 15
