"""An optimizer's state, loaded: in another order of groups, in another precision, and without the model's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from altgrad.config.recipe import Rule, TensorRecipe
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, ArmOptimizer, build_optimizer, weight_grids
from tests.optim.arms import ARMS, ON_GRID, arm_named, grid_of, normal_weights


def model_of(recipe: Recipe | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))
    return model if recipe is None else quantize_model(model, recipe)


def optimizer_of(model: nn.Module, arm: Arm) -> ArmOptimizer:
    return build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"), seed=1, reference=True)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[torch.Tensor]:
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = (0.01 * torch.randn(p.shape, generator=generator)).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ARMS)
def test_model_and_optimizer_go_on_from_their_state_dicts(name: str) -> None:
    """By two public calls each, as torch's loops do, whoever keeps the amax of weights on their quantization grid."""
    model = model_of(Recipe.uniform("E3M4"))
    optimizer = optimizer_of(model, arm_named(name))
    steps(model, optimizer, 0, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = steps(model, optimizer, 3, 6)
    again = model_of(Recipe.uniform("E3M4"))
    loaded = optimizer_of(again, arm_named(name))
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    assert all(map(torch.equal, steps(again, loaded, 3, 6), expected))
    x = torch.randn(4, 16)
    assert torch.equal(again(x), model(x))


def in_blocks(wrap: Any, model: nn.Sequential) -> nn.Module:
    return nn.Sequential(*(wrap(layer) for layer in model))


WRAPPED: dict[str, Any] = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "compiled, data parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "data parallel, compiled": lambda model: torch.compile(nn.DataParallel(model)),
    "compiled layers": partial(in_blocks, torch.compile),
    "checkpointed layers": partial(in_blocks, checkpoint_wrapper),
}


@pytest.mark.parametrize("there", WRAPPED)
@pytest.mark.parametrize("here", WRAPPED)
def test_a_state_moves_between_a_model_and_the_same_one_wrapped(here: str, there: str) -> None:
    """By name: the groups of one that knows other weights of linear layers come in another order."""
    arm = arm_named("spacing_unmatched")
    model, again = (model_of(Recipe.uniform("E3M4")) for _ in range(2))
    optimizer = optimizer_of(WRAPPED[here](model), arm)
    steps(model, optimizer, 0, 3)
    loaded = optimizer_of(WRAPPED[there](again), arm)
    loaded.param_groups.reverse()
    loaded.known.reverse()
    again.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, steps(again, loaded, 3, 6), steps(model, optimizer, 3, 6)))


def test_a_module_of_a_models_own_is_told_from_a_wrapper() -> None:
    """One called ``module``, of which the optimizer has all parameters or some."""
    for frozen in (False, True):
        models = [nn.ModuleDict({"module": nn.Linear(8, 8), "head": nn.Linear(8, 8)}) for _ in range(2)]
        for model in models:
            model["head"].requires_grad_(not frozen)
        found = [build_optimizer(each, Arm(lr=0.1)) for each in (models[0], nn.DataParallel(models[1]))]
        steps(models[0]["module"], found[0], 0, 2)
        models[1].load_state_dict(models[0].state_dict())
        found[1].load_state_dict(copy.deepcopy(found[0].state_dict()))
        ends = [steps(each["module"], optimizer, 2, 4) for each, optimizer in zip(models, found, strict=True)]
        assert all(map(torch.equal, *ends))


def test_parameters_of_one_name_are_told_by_their_places() -> None:
    optimizers = []
    for _ in range(2):
        layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]
        optimizers.append(ArmOptimizer({}, [layers[0].weight], Arm(lr=0.1), names={layers[0].weight: "weight"}))
        optimizers[-1].add_param_group({"params": [("weight", layers[1].weight)]})
    for number, group in enumerate(optimizers[0].param_groups):
        group["params"][0].grad = torch.full((4, 4), float(number))
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    moments = [[state["exp_avg"] for state in each.state.values()] for each in optimizers]
    assert all(map(torch.equal, *moments))


@pytest.mark.parametrize("name", [name for name in ON_GRID if arm_named(name).store != "codes"])
def test_weights_that_an_optimizer_was_built_for_anew_are_not_those_of_a_saved_state(name: str) -> None:
    """It has rounded them to the grid of their own amax, which is no longer the one that they were on."""
    model = model_of(Recipe.uniform("E3M4"))
    optimizer = optimizer_of(model, arm_named(name, held_scale="fixed"))
    with torch.no_grad():
        model[0].weight[model[0].weight.abs() >= 0.5 * model[0].weight.abs().max()] = 0  # half would be the grid itself
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = model_of(Recipe.uniform("E3M4"))
    again.load_state_dict(saved[0], assign=True)
    with pytest.raises(ValueError, match="build the optimizer first"):
        optimizer_of(again, arm_named(name)).load_state_dict(saved[1])


@pytest.mark.parametrize("name", ARMS)
def test_a_models_keys_do_not_tell_who_steps_it(name: str) -> None:
    virtual = Recipe(rules=[Rule(layers="*", weight=TensorRecipe(format="E3M4", virtual=True))])
    for recipe in (Recipe.uniform("E3M4"), virtual):
        model = model_of(recipe)
        before = list(model.state_dict())
        optimizer_of(model, arm_named(name))
        assert list(model.state_dict()) == before


def test_weights_that_are_loaded_alone_get_the_scale_of_their_own_amax() -> None:
    model, other = (model_of(Recipe.uniform("E3M4")) for _ in range(2))
    for made in (model, other):
        optimizer_of(made, arm_named("rung"))
    big = {name: 8 * t for name, t in other.state_dict().items()}
    model.load_state_dict(big)
    quantizer = model[0].quantizer("weight")
    assert quantizer.remembered_amax() == big["0.weight"].abs().max()


def test_names_tell_parameters_in_whatever_groups_they_were() -> None:
    """From the plain form, of which all matrices are in one group, into weights with a format, and back."""
    plain, quantized = model_of(None), model_of(Recipe.uniform("E3M4"))
    arm = Arm(lr=0.01, stiffness="ulp")
    one, two = optimizer_of(plain, arm), optimizer_of(quantized, arm)
    assert [g["params"] for g in one.state_dict()["param_groups"]] != [
        g["params"] for g in two.state_dict()["param_groups"]
    ] or one.grids.keys() != two.grids.keys()
    steps(plain, one, 0, 2)
    two.load_state_dict(one.state_dict())
    for (name, p), q in zip(plain.named_parameters(), quantized.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(one.state[p][key], two.state[q][key]), (name, key)


def shuffled(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same state with its groups, and the parameters in each, the other way round."""
    groups = [
        {**g, "params": g["params"][::-1], "param_names": g["param_names"][::-1]} for g in state["param_groups"][::-1]
    ]
    return {**state, "param_groups": groups}


def test_groups_in_another_order_are_the_same_state() -> None:
    model, other = (model_of(Recipe.uniform("E3M4")) for _ in range(2))
    optimizer, loaded = (optimizer_of(m, Arm(lr=0.01, stiffness="ulp")) for m in (model, other))
    steps(model, optimizer, 0, 2)
    optimizer.param_groups[0]["lr"] = 0.125
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(shuffled(optimizer.state_dict())))
    assert all(map(torch.equal, steps(other, loaded, 2, 4), steps(model, optimizer, 2, 4)))


def test_other_parameters_are_refused_before_anything_is_loaded() -> None:
    optimizer = optimizer_of(model_of(None), Arm(lr=0.01))
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"][0] = "somewhere"
    with pytest.raises(ValueError, match=r"parameter 0.weight is not in the saved state"):
        optimizer.load_state_dict(state)
    weights = normal_weights((4, 8), (8, 4))
    unnamed = ArmOptimizer({}, weights, Arm(lr=0.01))
    other = ArmOptimizer({}, weights[::-1], Arm(lr=0.01))
    for p in weights:
        p.grad = torch.ones_like(p)
    unnamed.step()
    with pytest.raises(ValueError, match="of parameters in another order"):
        other.load_state_dict(unnamed.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and here are \[1\]"):
        ArmOptimizer({}, weights[:1], Arm(lr=0.01)).load_state_dict(unnamed.state_dict())


@pytest.mark.parametrize("name", ["spacing_scaled", "muon", "adamw_sr_weights"])
def test_weights_in_bfloat16_keep_moments_in_float32_and_after_loading_too(name: str) -> None:
    arm = arm_named(name)
    p, again = (nn.Parameter(w.detach().bfloat16()) for w in normal_weights((8, 16)) * 2)
    optimizer, loaded = (ArmOptimizer({q: grid_of("E4M3", arm)}, [], arm) for q in (p, again))
    for number in range(2):
        p.grad = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
        optimizer.step()
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    moments = {name: t for name, t in loaded.state[again].items() if name != "step"}
    assert {t.dtype for t in moments.values()} == {torch.float32} and p.dtype == torch.bfloat16
    assert all(torch.equal(t, optimizer.state[p][name]) for name, t in moments.items())
    assert any(not torch.equal(t, t.bfloat16().float()) for t in moments.values())


def test_a_group_of_named_parameters_is_known_by_its_names() -> None:
    model = model_of(None)
    optimizer = ArmOptimizer({}, [nn.Parameter(torch.zeros(2))], Arm(lr=0.01))
    optimizer.add_param_group({"params": list(model.named_parameters())})
    assert optimizer.state_dict()["param_groups"][1]["param_names"] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("name", ["adamw", "eco", "adamw_coat"])
def test_a_state_is_kept_in_one_order_whatever_order_it_came_in(name: str) -> None:
    """Processes gather a state's parts one after the other, and files give theirs in any order."""
    model = model_of(Recipe.uniform("E3M4"))
    optimizer = optimizer_of(model, arm_named(name))
    steps(model, optimizer, 0, 2)
    saved, orders = optimizer.state_dict(), []
    for turned in (False, True):
        entries = {i: dict(sorted(of.items(), reverse=turned)) for i, of in saved["state"].items()}
        optimizer.load_state_dict(copy.deepcopy(saved | {"state": entries}))
        orders.append([list(state) for state in optimizer.state.values()])
    assert orders[0] == orders[1] and any(len(names) > 2 for names in orders[0])
