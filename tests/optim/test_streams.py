"""The random numbers of an arm: of seed, weight, step and place, the same in the loops and in the rules.

With gradients of zero and a decay, what a step wants is known to the bit, and so is what rounding makes of it.
"""

import pytest
import torch
from torch import nn

from altgrad.model import Recipe, quantize_model, requantize_model
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import format_constants, permutation, round_to_grid_stochastic, uniform
from altgrad.numerics.codes import at_coordinate, coordinate
from altgrad.optim import Arm, build_optimizer, state_codec, update, update_cpu
from tests.optim.arms import arm_named, make, normal_weights

SHAPE = (67, 131)  # more than one chunk, and a part of one
DECAY = 0.01


@pytest.fixture(params=["loops", "rules"])
def way(request, monkeypatch):
    """Take steps by the loops, then by the rules."""
    if request.param == "rules":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    else:
        request.getfixturevalue("compiler")
    return request.param


def still(weights, optimizer):
    for p in weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()


def expected(p, optimizer, name, stream):
    """Return what a step makes of ``p``, in float32 operations on whole tensors."""
    grid = optimizer.grids[p]
    scale, constants = grid.scale(p.detach()), format_constants("E3M4")
    random = uniform(p.shape, torch.tensor(stream))
    target = p.detach() * torch.tensor(1 - DECAY)
    if name == "adamw_sr_weights":
        return round_to_grid_stochastic(target * scale, constants, random) / scale
    place = coordinate(p.detach() * scale, constants).round()
    moved = coordinate(target * scale, constants) - place
    return at_coordinate(place + (moved + random).floor(), constants) / scale


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("name", ["adamw_sr_weights", "rung"])
def test_a_step_rounds_by_the_stream_of_seed_weight_and_step(way, name, seed):
    first, second, third = normal_weights(SHAPE, SHAPE, SHAPE)
    first.data.copy_(second)
    weights, optimizer = make(arm_named(name, decay=DECAY), "E3M4", [first, second, third], seed=seed)
    assert bool(optimizer._loops) == (way == "loops")
    for step in (1, 2, 3):
        wanted = [expected(p, optimizer, name, (seed, i, step)) for i, p in enumerate(weights)]
        still(weights, optimizer)
        for p, want in zip(weights, wanted, strict=True):
            assert torch.equal(p.detach(), want)
    assert not torch.equal(first, second), "the same weights, but not the same noise"


@pytest.mark.parametrize("name", ["adamw_sr_weights", "rung"])
def test_a_step_far_into_a_run_has_its_own_numbers(way, name):
    weights, optimizer = make(arm_named(name, decay=DECAY), "E3M4", normal_weights(SHAPE), seed=5)
    still(weights, optimizer)
    optimizer.state[weights[0]]["step"].fill_(10**7 - 1)
    wanted = expected(weights[0], optimizer, name, (5, 0, 10**7))
    still(weights, optimizer)
    assert torch.equal(weights[0].detach(), wanted)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.03])
def test_the_share_of_the_way_is_the_probability_in_a_step(way, share):
    """A step of so much of a rung, for half a million weights: their mean ends there within 5 standard errors."""
    count = 1 << 19
    weight = nn.Parameter(torch.cat([torch.tensor([1.9375]), torch.full((count - 1,), 1.0)]).view(512, -1))
    arm = arm_named("adamw_sr_weights", decay=0.0, lr=share / 16, betas=(0.0, 0.0))
    _, optimizer = make(arm, "E3M4", [weight])
    assert optimizer.grids[weight].scale(weight.detach()).item() == 16  # to E3M4's largest, 31: a rung is 1/16
    weight.grad = torch.full_like(weight, -1.0)
    weight.grad[0, 0] = 0.0
    optimizer.step()
    up = (weight.flatten()[1:] > 1).double()
    assert weight.flatten()[1:].unique().tolist() == [1.0, 1.0625]
    assert abs(up.mean().item() - share) < 5 * (share * (1 - share) / count) ** 0.5


@pytest.mark.parametrize("above", [False, True])
def test_a_weight_is_rounded_up_where_its_number_lies_below_its_share_of_the_way(way, above):
    """To the last bit of the numbers: at its own number a weight goes down, 2^-24 above it up."""
    shares = uniform(torch.Size(SHAPE), torch.tensor([9, 0, 1])) + (2.0**-24 if above else 0.0)
    weight = nn.Parameter(torch.zeros(SHAPE))
    weight.data[0, 0] = 1.9375
    _, optimizer = make(arm_named("adamw_sr_weights", decay=0.0), "E3M4", [weight], seed=9)
    weight.data.flatten()[1:] = shares.flatten()[1:] * 2.0**-10  # the lowest rung is 2^-6, and the scale 16
    still([weight], optimizer)
    assert (weight.detach().flatten()[1:] == (2.0**-10 if above else 0.0)).all()


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1])
def test_every_weight_has_a_shuffle_of_its_own(way, seed):
    weights = normal_weights((24, 32), (24, 32), (12, 32))
    weights[1].data.copy_(weights[0])
    weights, optimizer = make(arm_named("shuffled_unmatched"), weights=weights, seed=seed)
    for i, p in enumerate(weights):
        assert torch.equal(optimizer._orders[p], permutation(p.numel(), seed, i))
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert not torch.equal(weights[0], weights[1]), "the same weights and gradients"


def test_no_two_draws_of_a_run_are_of_one_stream(monkeypatch):
    """Of operands, weights and both moments, of all parameters, steps and recipes of two runs: so none correlate.

    The rules draw here; tests of loops and kernels have it that these take the same numbers.
    """
    monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    drawn, draw = [], Quantizer.draw
    monkeypatch.setattr(Quantizer, "draw", lambda self, rank=0: drawn.append(found := draw(self, rank)) or found)
    for module in (state_codec, update):
        monkeypatch.setattr(module, "uniform", lambda shape, stream: drawn.append(stream) or uniform(shape, stream))
    recipe = Recipe.uniform("E4M3", rounding="stochastic")
    moment = {"format": "E4M3", "rounding": "stochastic"}
    arm = Arm(lr=1e-2, weights="quantized", rounding="stochastic", state={"m": moment, "v": moment})
    for seed in (0, 1):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        optimizer = build_optimizer(quantize_model(model, recipe, seed=seed), arm, seed=seed)
        for change in (1, 2, 0):
            for _ in range(2):
                model(torch.randn(8, 64)).square().sum().backward()
                optimizer.step()
            if change:
                requantize_model(model, recipe, seed=seed, change=change)
    streams = [tuple(stream.tolist()) for stream in drawn]
    layers, steps, each = 3, 6, 3 + 3  # operands and what a step rounds
    assert len(streams) == 2 * layers * steps * each
    assert len(set(streams)) == len(streams)
    numbers = torch.stack([uniform(torch.Size([1000]), stream) for stream in drawn])
    assert torch.corrcoef(numbers).fill_diagonal_(0).abs().max() < 6 / 1000**0.5
