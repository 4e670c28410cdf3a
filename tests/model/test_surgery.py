"""Laws of surgery: it replaces what its recipe says, in each place, and loses no hook, history or parameter.

Oracles: the plain model; a model that was quantized once.
"""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import (
    GPT,
    GPTConfig,
    LayerRecipe,
    QuantizedLinear,
    Recipe,
    Rule,
    account,
    linear_layers,
    quantize_model,
    requantize_model,
    unquantize_model,
)

SIZES = GPTConfig(vocab_size=97, layers=2, width=16, heads=2, context=12)


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(SIZES)


def test_linear_layers_are_replaced_and_nothing_else():
    model, plain = gpt(3), gpt(3)
    before = {name: module for name, module in model.named_modules() if not isinstance(module, nn.Linear)}
    parameters = dict(model.named_parameters())
    quantize_model(model, Recipe.uniform("E3M4"))
    after = dict(model.named_modules())
    assert all(after[name] is module for name, module in before.items())
    assert all(isinstance(layer, QuantizedLinear) for layer in linear_layers(model).values())
    assert dict(model.named_parameters()) == parameters and model.head.weight is model.tokens.weight
    assert model.head.recipe.input is None and model.head.recipe.weight is not None
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


@pytest.mark.usefixtures("products")
def test_surgery_works_on_any_module():
    net = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    quantize_model(net, Recipe.uniform("E2M5"))
    assert [type(m) for m in net] == [nn.Conv1d, nn.Flatten, QuantizedLinear, nn.ReLU, QuantizedLinear]
    assert net[2].bias is not None
    net(torch.randn(3, 4, 2)).sum().backward()
    assert net[2].bias.grad is not None


def test_layers_go_by_pattern_and_the_last_rule_wins():
    e4m3, e5m2 = (LayerRecipe(weight=name) for name in ("E4M3", "E5M2"))
    recipe = Recipe(rules=(e4m3.on("blocks.*"), e5m2.on("blocks.1.mlp.*"), LayerRecipe().on("blocks.0.attn.out")))
    found = account(quantize_model(gpt(), recipe)).quantized
    assert {name: formats["weight"] for name, formats in found.items()} == {
        "blocks.0.attn.qkv": "E4M3", "blocks.0.mlp.up": "E4M3", "blocks.0.mlp.down": "E4M3",
        "blocks.1.attn.qkv": "E4M3", "blocks.1.attn.out": "E4M3",
        "blocks.1.mlp.up": "E5M2", "blocks.1.mlp.down": "E5M2",
    }  # fmt: skip


class Doubled(nn.Linear):
    """A linear layer by its class, and twice one by what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Named(nn.Linear):
    """One that computes what ``nn.Linear`` does."""


def doubled_by_hand() -> nn.Linear:
    """Return a layer whose own ``forward`` was put there, as libraries that move layers between devices do."""
    layer = nn.Linear(16, 16, bias=False)
    layer.forward = types.MethodType(Doubled.forward, layer)
    return layer


@pytest.mark.parametrize("make", [lambda: Doubled(16, 16, bias=False), doubled_by_hand], ids=["class", "instance"])
def test_a_layer_with_a_forward_of_its_own_is_left_and_listed(make) -> None:
    model = nn.Sequential(make(), nn.Linear(16, 64), nn.Linear(64, 16))
    before = model[0]
    with pytest.warns(UserWarning, match=r"no recipe reaches: 0\.weight \((Doubled|Linear)\)"):
        quantize_model(model, Recipe.uniform("E3M4"))
    assert model[0] is before and set(account(model).quantized) == {"1", "2"}
    assert account(model).left["0.weight"].endswith("its forward is not nn.Linear's")


def test_a_subclass_that_computes_the_same_is_quantized() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = quantize_model(nn.Sequential(Named(16, 16)), Recipe.uniform("E3M4"))
    assert account(model).shares["quantized"] == 1.0


REGISTER = ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
            "register_full_backward_pre_hook")  # fmt: skip


@pytest.mark.parametrize("backend", ["ours", "torchao"])
@pytest.mark.parametrize("register", REGISTER)
def test_hooks_on_a_layer_are_called_as_often_as_before(register: str, backend: str) -> None:
    recipe = Recipe.uniform("E4M3") if backend == "ours" else Recipe(rules=(LayerRecipe(torchao="tensorwise").on("*"),))
    model, called = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), []
    handle = getattr(model[0], register)(lambda *_: called.append(1))
    quantize_model(model, recipe)
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert called == [1]
    handle.remove()
    model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    assert called == [1]


def test_a_hook_that_takes_keywords_and_one_that_is_always_called_stay_so() -> None:
    model, called = nn.Sequential(nn.Linear(32, 32)), []
    model[0].register_forward_pre_hook(lambda module, args, kwargs: called.append(kwargs), with_kwargs=True)
    model[0].register_forward_hook(lambda *_: called.append("always"), always_call=True)
    quantize_model(model, Recipe.uniform("E4M3"))
    with pytest.raises(RuntimeError):
        model(torch.randn(16, 5))
    assert called == [{}, "always"]


def test_a_hook_that_came_after_quantization_stays_when_it_is_undone() -> None:
    model, called = nn.Sequential(nn.Linear(32, 32)), []
    quantize_model(model, Recipe.uniform("E4M3"))
    model[0].register_forward_hook(lambda *_: called.append(1))
    unquantize_model(model)(torch.randn(4, 32))
    assert called == [1]


RECIPES = {
    "tensor": Recipe.uniform("E3M4"), "plain": Recipe(rules=()),
    "virtual": Recipe(rules=[Rule(layers="*", weight={"format": "E3M4", "virtual": True})]),
    "torchao": Recipe(rules=[LayerRecipe(torchao="rowwise").on("*")]),
    "delayed": Recipe.uniform("E4M3", scaling="delayed"),
}  # fmt: skip


@pytest.mark.parametrize("first", RECIPES)
@pytest.mark.parametrize("second", RECIPES)
def test_a_model_that_is_quantized_anew_is_one_that_was_quantized_so(first: str, second: str) -> None:
    """With its parameters, its mode and what hangs on its calls."""
    called: list[int] = []
    again, fresh = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)).eval() for _ in range(2))
    again.load_state_dict(fresh.state_dict())
    parameters = list(again.parameters())
    again[0].register_forward_hook(lambda *_: called.append(1))
    requantize_model(quantize_model(again, RECIPES[first]), RECIPES[second])
    quantize_model(fresh, RECIPES[second])
    assert list(map(id, again.parameters())) == list(map(id, parameters))
    assert str(again) == str(fresh) and len(again._forward_hooks) == len(fresh._forward_hooks)
    x = torch.randn(16, 32)
    for model in (again, fresh):
        model(x).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(again.parameters(), fresh.parameters(), strict=True))
    assert called == [1] and not any(module.training for module in again.modules())


@pytest.mark.parametrize("kept", [True, False])
def test_a_history_goes_on_where_it_means_the_same_and_random_numbers_are_new(kept: bool) -> None:
    def recipe(fmt: str, length: int) -> Recipe:
        stochastic = {"format": "E5M2", "rounding": "stochastic"}
        delayed = {"format": fmt, "scaling": "delayed", "history": length}
        return Recipe(rules=[Rule(layers="*", input=delayed, grad=stochastic)])

    model = quantize_model(nn.Sequential(nn.Linear(16, 16)), recipe("E3M4", 4), seed=3)
    for size in (1.0, 2.0, 3.0):
        model(torch.full((4, 16), size)).sum().backward()
    drawn = model[0].quantizer("grad").stream.tolist()
    requantize_model(model, recipe("E5M2", 4 if kept else 5), seed=3, change=2)
    assert isinstance(model[0], QuantizedLinear)
    assert model[0].quantizer("input").history.tolist() == ([3, 2, 1, 0] if kept else [0] * 5)
    assert drawn[2] == 3 and model[0].quantizer("grad").stream.tolist() == [3, drawn[1] + (2 << 20), 0]
