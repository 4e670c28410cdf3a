"""Laws of torchao's layers as baselines: same parameters, refused sizes. Oracle: torchao's own configurations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altgrad.config.recipe import TORCHAO_RECIPES
from altgrad.formats import get_format
from altgrad.model import (
    GPT,
    GPTConfig,
    LayerRecipe,
    QuantizedLinear,
    Recipe,
    TensorRecipe,
    layer_recipe,
    linear_layers,
    quantize_model,
)
from altgrad.model.torchao import tensor_recipes

CONFIG = GPTConfig(vocab_size=97, layers=1, width=32, heads=2, context=16)


def blocks(name: str) -> Recipe:
    return Recipe(rules=(LayerRecipe(torchao=name).on("blocks.*"),))


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def loss_of(gpt: GPT, autocast: bool = True) -> torch.Tensor:
    tokens = torch.randint(0, 97, (4, 17), generator=torch.Generator().manual_seed(5))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return gpt(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("name", TORCHAO_RECIPES)
def test_torchao_gets_the_matched_layers_with_their_parameters(name):
    gpt = model()
    parameters, head, states = dict(gpt.named_parameters()), gpt.head, set(gpt.state_dict())
    quantize_model(gpt.eval(), blocks(name))
    assert dict(gpt.named_parameters()) == parameters and set(gpt.state_dict()) == states
    assert gpt.head is head and gpt.head.weight is gpt.tokens.weight and layer_recipe(head) is None
    layers = linear_layers(gpt)
    assert set(layers) == set(linear_layers(model()))
    changed = [layer for layer_name, layer in layers.items() if layer_name != "head"]
    assert all(type(layer).__name__ == "Float8Linear" and not layer.training for layer in changed)
    assert all(layer_recipe(layer) == LayerRecipe(torchao=name) for layer in changed)


def test_a_tied_head_stays_tied():
    gpt = GPT(GPTConfig(vocab_size=96, layers=1, width=32, heads=2, context=16))
    quantize_model(gpt, Recipe(rules=(LayerRecipe(torchao="tensorwise").on("head"),)))
    assert type(gpt.head).__name__ == "Float8Linear" and gpt.head.weight is gpt.tokens.weight


@pytest.mark.parametrize("autocast", [True, False], ids=["bf16", "float32"])
@pytest.mark.parametrize("name", TORCHAO_RECIPES)
def test_an_optimizer_made_before_trains_the_model(name, autocast):
    gpt = model()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3)
    quantize_model(gpt, blocks(name))
    losses = []
    for _ in range(15):
        loss = loss_of(gpt, autocast)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad.dtype == torch.float32 for parameter in gpt.parameters())
    assert losses[-1] < 0.9 * losses[0]


def test_a_bias_is_kept():
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    bias = net[0].bias
    quantize_model(net, Recipe(rules=(LayerRecipe(torchao="rowwise").on("*"),)))
    net(torch.randn(16, 16)).sum().backward()
    assert net[0].bias is bias and bias.grad is not None


def test_torchao_and_our_layers_share_a_model():
    e3m4 = LayerRecipe(weight=TensorRecipe(format=get_format("E3M4")))
    gpt = quantize_model(model(), Recipe(rules=(*blocks("rowwise").rules, e3m4.on("blocks.*.mlp.*"), e3m4.on("head"))))
    ours = {name for name, layer in linear_layers(gpt).items() if isinstance(layer, QuantizedLinear)}
    assert ours == {"blocks.0.mlp.up", "blocks.0.mlp.down", "head"}
    loss_of(gpt).backward()


@pytest.mark.parametrize(("rows", "columns"), [(40, 32), (32, 40), (97, 32)])
def test_a_size_that_torchao_cannot_take_is_refused_by_the_layers_name(rows, columns):
    net = nn.Sequential(nn.Linear(columns, rows))
    with pytest.raises(ValueError, match=f"layer 0 is {rows} x {columns}, .* divisible by 16; leave the layer out"):
        quantize_model(net, Recipe(rules=(LayerRecipe(torchao="tensorwise").on("*"),)))
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"torchao": "columnwise"}, "torchao: input should be 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"),
        ({"torchao": "rowwise", "weight": TensorRecipe(format="E4M3")}, "torchao: rowwise decides weight itself"),
        ({"torchao": "rowwise", "accumulate": "float32"}, "torchao: rowwise has no setting accumulate"),
    ],
)
def test_torchao_excludes_settings_of_ours(field, words):
    with pytest.raises(ValueError, match=words):
        LayerRecipe(**field)


@pytest.mark.parametrize("name", TORCHAO_RECIPES)
def test_a_recipe_says_what_torchao_does(name):
    recipe = LayerRecipe(torchao=name)
    assert recipe.tensors() == tensor_recipes(name)
    grad = "E5M2" if name == "tensorwise" else "E4M3"
    assert recipe.format_names() == {"weight": "E4M3", "input": "E4M3", "grad": grad}


def test_a_torchao_that_does_something_else_is_refused(monkeypatch):
    monkeypatch.setitem(TORCHAO_RECIPES, "tensorwise", TORCHAO_RECIPES["rowwise"])
    with pytest.raises(ValueError, match="this torchao's recipe tensorwise quantizes to"):
        quantize_model(model(), blocks("tensorwise"))
