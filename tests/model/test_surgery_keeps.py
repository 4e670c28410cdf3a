"""What surgery must not lose: hooks on calls, and what a layer of another kind computes. Oracle: the plain model."""

from __future__ import annotations

import types
import warnings

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import LayerRecipe, Recipe, account, quantize_model, unquantize_model


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


def test_a_uniform_that_would_leave_such_layers_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight \(Doubled\); a model quantized by the pattern '\*' would be"):
        quantize_model(nn.Sequential(Doubled(16, 16)), Recipe.uniform("E3M4"))


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
    recipe = Recipe.uniform("E4M3") if backend == "ours" else Recipe((LayerRecipe(torchao="tensorwise").on("*"),))
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
