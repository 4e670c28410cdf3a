"""Laws of the transformer and of its surgery.

Oracles: causality and the uniform distribution's entropy, which hold for any weights; torch's own
layers for what surgery must leave alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from altgrad.formats import get_format
from altgrad.model import GPT, GPTConfig, LayerRecipe, QuantizedLinear, Recipe, TensorRecipe, quantize_model
from altgrad.model import gpt as gpt_module
from altgrad.model.surgery import linear_layers

CONFIG = GPTConfig(vocab_size=97, layers=2, width=16, heads=2, context=12)


def model(seed: int = 0, config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def tokens(batch: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_contexts_attend_as_torch_does_from_plain_products(dtype):
    q, k, v = torch.randn(3, 2, 4, 12, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(gpt_module._plain_attention(q, k, v, gpt_module._causal_mask(torch.arange(12)), 0.0), expected)


def test_an_untrained_model_is_as_unsure_as_a_uniform_guess():
    loss = model()(tokens(), tokens().roll(1))
    assert abs(loss.item() - math.log(97)) < 0.05


def test_the_head_is_the_token_embedding():
    gpt = model()
    assert gpt.head.weight is gpt.tokens.weight
    quantize_model(gpt, Recipe.uniform("E4M3"))
    assert gpt.head.weight is gpt.tokens.weight


def test_equal_seeds_give_equal_weights_in_every_recipe():
    plain, quantized = model(3), quantize_model(model(3), Recipe.uniform("E5M2"))
    states = plain.state_dict(), quantized.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_width_must_be_divisible_by_heads():
    with pytest.raises(ValueError, match="divisible"):
        GPTConfig(vocab_size=8, layers=1, width=10, heads=3, context=4)


def test_surgery_replaces_linear_layers_and_nothing_else():
    gpt = model()
    before = {name: module for name, module in gpt.named_modules() if not isinstance(module, nn.Linear)}
    parameters = dict(gpt.named_parameters())
    quantize_model(gpt, Recipe.uniform("E3M4"))
    after = dict(gpt.named_modules())
    assert all(after[name] is module for name, module in before.items())
    assert all(isinstance(layer, QuantizedLinear) for layer in linear_layers(gpt).values())
    assert dict(gpt.named_parameters()) == parameters
    assert gpt.head.recipe.input is None and gpt.head.recipe.weight is not None


@pytest.mark.usefixtures("products")
def test_surgery_works_on_any_module():
    net = nn.Sequential(nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    quantize_model(net, Recipe.uniform("E2M5"))
    assert [type(m) for m in net] == [nn.Conv1d, nn.Flatten, QuantizedLinear, nn.ReLU, QuantizedLinear]
    assert net[2].bias is not None
    net(torch.randn(3, 4, 2)).sum().backward()
    assert net[2].bias.grad is not None


def test_layers_by_pattern_and_the_last_rule_wins():
    e4m3, e5m2 = (LayerRecipe(weight=TensorRecipe(format=get_format(name))) for name in ("E4M3", "E5M2"))
    recipe = Recipe(rules=(e4m3.on("blocks.*"), e5m2.on("blocks.1.mlp.*"), LayerRecipe().on("blocks.0.attn.out")))
    gpt = quantize_model(model(), recipe)
    found = {
        name: layer.recipe.weight.format.name
        for name, layer in linear_layers(gpt).items()
        if isinstance(layer, QuantizedLinear)
    }
    assert found == {
        "blocks.0.attn.qkv": "E4M3", "blocks.0.mlp.up": "E4M3", "blocks.0.mlp.down": "E4M3",
        "blocks.1.attn.qkv": "E4M3", "blocks.1.attn.out": "E4M3",
        "blocks.1.mlp.up": "E5M2", "blocks.1.mlp.down": "E5M2",
    }  # fmt: skip


def test_a_pattern_that_matches_nothing_names_the_nearest_layer():
    recipe = Recipe(rules=(LayerRecipe().on("blocks.0.atn.qkv"),))
    with pytest.raises(ValueError, match=r"matches no layer; did you mean blocks\.0\.attn\.qkv or"):
        quantize_model(model(), recipe)


@pytest.mark.parametrize(
    "first",
    [Recipe.uniform("E4M3"), Recipe(rules=[LayerRecipe(torchao="tensorwise").on("blocks.*")])],
    ids=["", "torchao"],
)
def test_surgery_twice_is_refused(first):
    gpt = quantize_model(model(), first)
    with pytest.raises(ValueError, match="already quantized"):
        quantize_model(gpt, Recipe.uniform("E5M2"))


@pytest.mark.parametrize("field", [{"scaling": "sometimes"}, {"scale": "fp8"}, {"reduce": "mean"}, {"history": 0}])
def test_an_unknown_choice_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        TensorRecipe(format=get_format("E4M3"), **field)


@pytest.mark.parametrize("field", [{"gradient": "identity"}, {"accumulate": "fp8"}])
def test_an_unknown_choice_for_a_layer_is_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        LayerRecipe(**field)
