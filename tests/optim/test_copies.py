"""Copies and pickles of an optimizer with its model go on by themselves, to the bit, as torch's optimizers do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.config.arms import BASES
from altgrad.config.recipe import Rule, TensorRecipe
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, ArmOptimizer, build_optimizer
from altgrad.optim.weight_grid import CodeWeight
from tests.optim.arms import ARMS, arm_named

Pair = tuple[nn.Module, ArmOptimizer]
VIRTUAL = Recipe(rules=[Rule(layers="*", weight=TensorRecipe(format="E3M4", virtual=True))])
STOCHASTIC = {"format": "E4M3", "rounding": "stochastic"}
CASES: dict[str, tuple[Arm, Recipe | None]] = {name: (arm_named(name), Recipe.uniform("E4M3")) for name in ARMS} | {
    f"plain {base}": (Arm(lr=1e-2, base=base, **({"stiffness": "ulp"} if BASES[base].metric else {})), None)
    for base in BASES if BASES[base].unit == "weight"
} | {
    "virtual": (Arm(lr=1e-2, stiffness="ulp"), VIRTUAL),
    "virtual on grid": (Arm(lr=1e-2, weights="quantized", rounding="stochastic"), VIRTUAL),
    "delayed": (Arm(lr=1e-2, stiffness="ulp"), Recipe.uniform("E4M3", scaling="delayed")),
    "codes": (Arm(lr=1e-2, stiffness="ulp", state={"m": STOCHASTIC, "v": "dynamic8", "least": 0}),
              Recipe.uniform("E4M3")),
    "permuted": (Arm(lr=1e-2, stiffness="permuted"), Recipe.uniform("E4M3")),
}  # fmt: skip


def saved(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    found: tuple[Any, Any] = torch.load(file, weights_only=False)
    return found


COPIES: dict[str, Callable[[Pair], Pair]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy of the optimizer first": lambda pair: copy.deepcopy(pair[::-1])[::-1],
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "pickle of the optimizer first": lambda pair: pickle.loads(pickle.dumps(pair[::-1]))[::-1],
    "torch.save": saved,
}


def pair_of(arm: Arm, recipe: Recipe | None, **options: Any) -> Pair:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.Linear(24, 8))
    if recipe is not None:
        quantize_model(model, recipe)
    return model, build_optimizer(model, arm, seed=2, steps=6, **options)


def trained(pair: Pair, first: int, last: int) -> list[Tensor]:
    """Take steps and return the weights, the output in evaluation, and the optimizer's state."""
    model, optimizer = pair
    for number in range(first, last):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    state = optimizer.state_dict()["state"]
    ends = [t for i in sorted(state) for _, t in sorted(state[i].items())]
    with torch.no_grad():
        ends += [model.eval()(x), *(p.detach() * 1 for p in model.train().parameters())]
    return [t.clone() for t in ends]


@pytest.mark.filterwarnings("ignore:this model has no quantized weight")
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", CASES)
def test_a_copy_goes_on_as_the_original_does_and_leaves_it_alone(name: str, how: str) -> None:
    expected = trained(pair_of(*CASES[name]), 0, 6)
    pair = pair_of(*CASES[name])
    trained(pair, 0, 3)
    other = COPIES[how](pair)
    for each in (other, pair):
        assert all(map(torch.equal, trained(each, 3, 6), expected))
    classes = [[type(p) for p in model.parameters()] for model, _ in (pair, other)]
    assert classes[0] == classes[1]


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_what_was_not_stepped_yet_is_one_too(how: str) -> None:
    for arm in (Arm(lr=1e-2, stiffness="ulp"), arm_named("eco", store="codes"), Arm(lr=1e-2)):
        pair = COPIES[how](pair_of(arm, Recipe.uniform("E4M3"), reference=True))
        expected = trained(pair_of(arm, Recipe.uniform("E4M3"), reference=True), 0, 3)
        assert all(map(torch.equal, trained(pair, 0, 3), expected))
        assert pair[1].reference


def test_values_that_were_loaded_and_wait_for_their_scale_wait_in_a_copy_too() -> None:
    arm = arm_named("eco", store="codes", held_scale="fixed")
    first, second = (pair_of(arm, Recipe.uniform("E4M3")) for _ in range(2))
    weight = first[0].get_parameter("0.weight")
    with torch.no_grad():
        weight[weight.abs() >= 0.6 * weight.abs().max()] = 0  # so that the scale is not that of the amax
    trained(first, 0, 3)
    states = copy.deepcopy([each.state_dict() for each in first])
    second[0].load_state_dict(states[0])
    other = copy.deepcopy(second)
    other[1].load_state_dict(states[1])
    assert isinstance(other[0].get_parameter("0.weight"), CodeWeight)
    assert all(map(torch.equal, trained(other, 3, 6), trained(first, 3, 6)))


@pytest.mark.parametrize("name", ["adamw", "spacing_unmatched", "eco"])
def test_a_copy_of_the_optimizer_alone_steps_parameters_of_its_own(name: str) -> None:
    """As torch's does, with those of its groups alone: one that no group has is no part of it."""
    model, optimizer = pair_of(arm_named(name), Recipe.uniform("E4M3"))
    trained((model, optimizer), 0, 2)
    before = [p.detach().clone() for p in model.parameters()]
    other = copy.deepcopy(optimizer)
    mine, own = ([p for group in each.param_groups for p in group["params"]] for each in (optimizer, other))
    for p, q in zip(mine, own, strict=True):
        q.grad = p.grad.clone()
    other.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step()
    assert all(map(torch.equal, mine, own))
    assert not {id(p) for p in mine} & {id(p) for p in (*other.names, *other.grids)}
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_copy_does_not_take_frozen_parameters_along() -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
    model[0].requires_grad_(False)
    assert len(copy.deepcopy(build_optimizer(model, Arm(lr=1e-2))).names) == 2


def test_a_copy_of_one_with_a_compiled_rule_has_one() -> None:
    arm = arm_named("row_relative")
    pair = pair_of(arm, Recipe.uniform("E4M3"), compiled=True)
    other = copy.deepcopy(pair)
    assert all(map(torch.equal, trained(other, 0, 2), trained(pair, 0, 2)))
    assert other[1].compiled
