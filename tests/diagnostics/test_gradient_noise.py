"""The noise of weight gradients, cause by cause.

Oracles: the gradient of the unquantized model at rounded weights, and of one layer with its input or its incoming
gradient rounded by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from altgrad.config.recipe import ROLES
from altgrad.diagnostics.noise_sources import noises, only
from altgrad.model import GPT, GPTConfig, Recipe, linear_layers
from altgrad.numerics import compute_scale, quantize

LAST = "blocks.0.mlp.down"


def made(seed: int = 0) -> tuple[GPT, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=11, layers=1, width=8, heads=2, context=8)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10 if p.ndim == 2 else 1)
    return model, torch.randint(11, (6, 8)), torch.randint(11, (6, 8))


def rounded(t: Tensor, fmt: str) -> Tensor:
    scale = compute_scale(t.abs().max(), fmt)
    return quantize(t * scale, fmt) / scale


def gradient(model: GPT, name: str, inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.autograd.grad(model(inputs, targets), model.get_submodule(name).weight)[0]


def test_that_of_weights_is_what_rounding_them_beforehand_changes() -> None:
    model, inputs, targets = made()
    found = noises(model, Recipe.uniform("E3M2"), ROLES, {}, inputs, targets)
    exact = {name: gradient(model, name, inputs, targets) for name in found}
    for layer in linear_layers(model).values():  # the head's own weight too, which the embedding keeps unrounded
        layer.weight = torch.nn.Parameter(rounded(layer.weight.detach(), "E3M2"))
    for name, noise in found.items():
        changed = gradient(model, name, inputs, targets)
        assert noise.signal == pytest.approx(exact[name].double().square().sum().item(), rel=1e-5)
        assert noise.causes["weight"] == pytest.approx((changed - exact[name]).double().square().sum().item(), rel=1e-3)


def test_that_of_inputs_and_gradients_is_what_rounding_them_by_hand_changes() -> None:
    """Of one layer that alone is quantized: dW is the product of its incoming gradient and its input."""
    model, inputs, targets = made(1)
    seen: dict[str, Tensor] = {}
    layer = model.get_submodule(LAST)
    layer.register_forward_hook(lambda _, x, y: seen.update(x=x[0].detach(), y=y) or y.retain_grad())
    model(inputs, targets).backward()
    x, g = seen["x"].flatten(0, 1), seen["y"].grad.flatten(0, 1)
    layer._forward_hooks.clear()
    recipe = Recipe(rules=tuple(rule.but(layers=LAST) for rule in Recipe.uniform("E3M2", grad="E2M3").rules[:1]))
    noise = noises(model, recipe, ROLES, {}, inputs, targets)[LAST]
    by_grad = rounded(g, "E2M3").T @ x - g.T @ x
    assert noise.causes["grad"] == pytest.approx(by_grad.double().square().sum().item(), rel=1e-3)
    assert noise.causes["input"] > 0 and noise.causes["weight"] > 0


def test_what_is_not_quantized_is_no_cause_and_one_cause_is_all_there_is() -> None:
    model, inputs, targets = made(2)
    recipe = only(Recipe.uniform("E4M3"), ["input"])
    before = {name: p.clone() for name, p in model.named_parameters()}
    for noise in noises(model, recipe, ["input"], {}, inputs, targets).values():
        assert list(noise.causes) in (["input"], []) and noise.together == sum(noise.causes.values())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(type(layer) is torch.nn.Linear for layer in linear_layers(model).values())


def test_a_finer_format_has_less_of_it_by_the_square_of_its_spacing() -> None:
    """Four bits more of significand are spacings 16 times finer, in weights, inputs and gradients alike."""
    model, inputs, targets = made(3)
    coarse, fine = (
        noises(model, Recipe.uniform(fmt, grad=fmt), ROLES, {}, inputs, targets) for fmt in ("E5M6", "E5M10")
    )
    for name, noise in coarse.items():
        assert 16**2 / 4 < noise.together / fine[name].together < 16**2 * 4
