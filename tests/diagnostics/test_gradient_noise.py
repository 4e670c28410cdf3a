"""The noise of weight gradients, cause by cause.

Oracles: the gradient of the unquantized model at rounded weights, and of one layer with its input or its incoming
gradient rounded by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from altgrad.config.recipe import ROLES, Rule
from altgrad.diagnostics.analysis import LayerView
from altgrad.diagnostics.gradients import Batch, bias_and_scatter, cosine_exact, noises, only
from altgrad.model import GPT, GPTConfig, Recipe, linear_layers, quantize_model, unquantize_model
from altgrad.numerics import compute_scale, quantize, rotate_rows

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


def factors(model: GPT, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the last layer is called with, and the gradient of its output, (tokens, features) each."""
    seen: dict[str, Tensor] = {}
    layer = model.get_submodule(LAST)
    layer.register_forward_hook(lambda _, x, y: seen.update(x=x[0].detach(), y=y) or y.retain_grad())
    model(inputs, targets).backward()
    layer._forward_hooks.clear()
    return seen["x"].flatten(0, 1), seen["y"].grad.flatten(0, 1)


def gradient(model: GPT, name: str, inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.autograd.grad(model(inputs, targets), model.get_submodule(name).weight)[0]


def test_that_of_weights_is_what_rounding_them_beforehand_changes() -> None:
    model, inputs, targets = made()
    found = noises(Batch(model, {}, inputs, targets), Recipe.uniform("E3M2"), ROLES)
    exact = {name: gradient(model, name, inputs, targets) for name in found}
    for layer in linear_layers(model).values():  # the head's own weight too, which the embedding keeps unrounded
        layer.weight = torch.nn.Parameter(rounded(layer.weight.detach(), "E3M2"))
    for name, noise in found.items():
        changed = gradient(model, name, inputs, targets)
        assert noise.signal == pytest.approx(exact[name].double().square().sum().item(), rel=1e-5)
        assert noise.causes["weight"] == pytest.approx((changed - exact[name]).double().square().sum().item(), rel=1e-3)


def test_the_cosine_is_that_of_the_two_gradients() -> None:
    """Oracle: of the gradient of the model as training quantizes it, in float32."""
    model, inputs, targets = made(6)
    recipe = only(Recipe.uniform("E2M1", grad="E5M2"), ROLES)
    found = noises(Batch(model, {}, inputs, targets), recipe, ROLES)
    exact = {name: gradient(model, name, inputs, targets) for name in found}
    quantize_model(model, recipe)
    for name, noise in found.items():
        noisy = gradient(model, name, inputs, targets)
        expected = torch.cosine_similarity(exact[name].flatten(), noisy.flatten(), dim=0)
        assert cosine_exact(LayerView(name, 0, noise=noise)) == pytest.approx(expected.item(), abs=1e-5)
        assert expected < 0.999


@pytest.mark.parametrize("hadamard", [0, 16])
def test_that_of_gradients_is_what_rounding_them_by_hand_changes(hadamard: int) -> None:
    """Of one layer that alone is quantized: dW is the product of its incoming gradient and its input.

    Rotated as in NVFP4, the other factor is rotated too, and not rounded, so that nothing else is to be seen of it.
    """
    model, inputs, targets = made(1)
    x, g = factors(model, inputs, targets)
    recipe = Recipe(rules=(Rule(layers=LAST, weight="E3M2", input="E3M2", grad="E2M1", hadamard=hadamard),))
    noise = noises(Batch(model, {}, inputs, targets), recipe, ROLES)[LAST]
    plain, rotated = rounded(g, "E2M1").T @ x - g.T @ x, rounded(rotate_rows(g), "E2M1").T @ rotate_rows(x) - g.T @ x
    powers = [t.double().square().sum().item() for t in (plain, rotated)]
    assert noise.causes["grad"] == pytest.approx(powers[hadamard > 0], rel=1e-3)
    assert powers[0] != pytest.approx(powers[1], rel=0.05)
    assert noise.causes["input"] > 0 and noise.causes["weight"] > 0


def test_what_is_not_quantized_is_no_cause_and_one_cause_is_all_there_is() -> None:
    model, inputs, targets = made(2)
    recipe = only(Recipe.uniform("E4M3"), ["input"])
    before = {name: p.clone() for name, p in model.named_parameters()}
    for noise in noises(Batch(model, {}, inputs, targets), recipe, ["input"]).values():
        assert list(noise.causes) in (["input"], []) and noise.together == sum(noise.causes.values())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(type(layer) is torch.nn.Linear for layer in linear_layers(model).values())


def test_gradients_are_as_large_as_in_a_step() -> None:
    """A power of two by floor clamps the head's gradient in steps of 16 and 32 sequences of 8 tokens, and not of 24."""
    model, inputs, targets = made(3)
    low = {"format": "E4M3", "granularity": "row", "scale": "E8M0", "scale_rounding": "floor"}
    recipe = Recipe(rules=(Rule(layers="head", grad=low),))
    found = {
        sequences: sum(noise.causes["grad"] for noise in noises(
            Batch(model, {}, inputs, targets, 1 / sequences), recipe, ["grad"]
        ).values())
        for sequences in (16, 24, 32)
    }  # fmt: skip
    assert found[32] == pytest.approx(found[16], rel=1e-6) and found[32] > 2 * found[24]
    doubled = noises(Batch(model, {}, inputs, targets, 2 / 16), recipe, ["grad"])
    assert sum(noise.causes["grad"] for noise in doubled.values()) == pytest.approx(found[16], rel=1e-6)


def test_bias_and_scatter_are_those_of_the_noises_of_each_sequence() -> None:
    model, inputs, targets = made(5)
    recipe = only(Recipe.uniform("E3M2"), ROLES)
    found = bias_and_scatter(Batch(model, {}, inputs, targets), recipe, sequences=24)
    drawn: dict[str, list[Tensor]] = {name: [] for name in found}
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        exact = {name: gradient(model, name, x, y) for name in found}
        quantize_model(model, recipe)
        for name in found:
            drawn[name].append((gradient(model, name, x, y) - exact[name]).double())
        unquantize_model(model)
    for name, noises_ in drawn.items():
        stacked = torch.stack(noises_).flatten(1)
        variance = stacked.var(dim=0).sum().item()  # over 6 - 1
        mean = stacked.mean(0).square().sum().item()
        bias, scatter = found[name]
        assert bias == pytest.approx(max(mean - variance / 6, 0.0), rel=1e-6, abs=1e-9 * mean)
        assert scatter == pytest.approx(variance / 24, rel=1e-6)


def test_one_sequence_cannot_tell_bias_from_scatter() -> None:
    model, inputs, targets = made(8)
    found = bias_and_scatter(Batch(model, {}, inputs[:1], targets[:1]), only(Recipe.uniform("E3M2"), ROLES), 6)
    assert all(math.isnan(bias) and math.isnan(scatter) for bias, scatter in found.values())
