"""Laws of anyone's model: every layer that is known is quantized, none is lost without a word, gradients stay right.

Oracles: transformers' own models with random weights; the same layer as an ``nn.Linear`` whose weight is the
transpose; the sum of a layer's gradients over the places that call it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from altgrad.formats import get_format
from altgrad.model import (
    LayerRecipe,
    QuantizedLinear,
    Recipe,
    TensorRecipe,
    account,
    linear_layers,
    matrix_of,
    quantize_model,
    unquantize_model,
)  # fmt: skip
from altgrad.numerics import operand
from altgrad.optim import Arm, build_optimizer, weight_grids

TOKENS = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(2))
WAYS = {
    "tensor": {},
    "delayed": {"scaling": "delayed", "history": 3},
    "row": {"granularity": "row"},
    "block": {"granularity": "block", "scale": "E8M0", "block": 8},
    "clipped codes": {"gradient": "clipped", "save": "codes"},
    "native": {"backend": "native"},
}
ARMS = {
    "adamw": Arm(lr=1e-2),
    "stiff": Arm(lr=1e-2, stiffness="ulp"),
    "riemann_adam": Arm(base="riemann_adam", lr=1e-2, stiffness="ulp"),
}
ON_GRID = {
    "adamw": Arm(lr=1e-2, weights="quantized", rounding="nearest"),
    "rung": Arm(base="rung", lr=1.0, plain_lr=1e-2, weights="quantized", rounding="stochastic"),
}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    )


def llama(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, tie_word_embeddings=tied, **sizes))


MODELS = {"gpt2": gpt2, "llama": lambda: llama(False), "llama, tied": lambda: llama(True)}


def losses(model: nn.Module, arm: Arm, steps: int = 12) -> list[float]:
    grids = weight_grids(model, on_grid=arm.weights == "quantized")
    assert grids
    optimizer, found = build_optimizer(model, arm, grids), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# --- transformers' models ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_product_with_a_weight_is_quantized_and_the_head_by_its_weight_alone(name):
    model = MODELS[name]()
    parameters, tied = dict(model.named_parameters()), model.lm_head.weight is model.get_input_embeddings().weight
    found = account(quantize_model(model, Recipe.uniform("E4M3")))
    assert len(found.quantized) == {"gpt2": 9, "llama": 15, "llama, tied": 15}[name]
    assert found.shares == {"quantized": 1.0, "unknown": 0.0}
    heads = {name for name, formats in found.quantized.items() if formats["input"] is None}
    assert heads == {"lm_head"} and found.quantized["lm_head"]["weight"] == "E4M3"
    assert dict(model.named_parameters()) == parameters
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied == (name != "llama")


KINDS = {**ARMS, **{f"{name}, on grid": arm for name, arm in ON_GRID.items()}}


@pytest.mark.parametrize(
    ("name", "arm"), [*(("gpt2", arm) for arm in KINDS), ("llama", "stiff"), ("llama, tied", "rung, on grid")]
)
def test_it_learns_with_every_kind_of_arm(name, arm):
    found = losses(quantize_model(MODELS[name](), Recipe.uniform("E4M3")), KINDS[arm])
    assert found[-1] < found[0] - 0.2


def test_weights_of_a_conv1d_stay_on_the_quantization_grid():
    model = quantize_model(gpt2(), Recipe.uniform("E4M3"))
    losses(model, ON_GRID["adamw"], 3)
    layer = model.transformer.h[0].mlp.c_fc
    scaled = layer.weight.detach() * layer.quantizers["weight"].scales(matrix_of(layer))
    assert len(scaled.unique()) <= len(get_format("E4M3").values)


@pytest.mark.parametrize("name", MODELS)
def test_unquantized_again_it_computes_what_it_did(name):
    model = MODELS[name]()
    expected, kinds = model(TOKENS).logits, {name: type(layer) for name, layer in linear_layers(model).items()}
    quantized = quantize_model(model, Recipe.uniform("E2M5"))
    assert not torch.equal(quantized(TOKENS).logits, expected)
    copied = unquantize_model(copy.deepcopy(quantized))
    assert torch.equal(copied(TOKENS).logits, expected) and torch.equal(
        unquantize_model(quantized)(TOKENS).logits, expected
    )
    assert {name: type(layer) for name, layer in linear_layers(copied).items()} == kinds
    assert copied.lm_head.weight is not model.lm_head.weight


# --- a weight that is stored the other way round -----------------------------------------------------


def pair(**settings: object) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a Conv1D and the nn.Linear that computes the same, quantized alike."""
    torch.manual_seed(1)
    conv, linear = Conv1D(24, 48), nn.Linear(48, 24)
    with torch.no_grad():
        conv.weight.mul_(torch.logspace(0, 2, 24)).mul_(torch.logspace(0, 1, 48)[:, None])
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias.normal_())
    fmt = "E4M3" if settings.get("backend") == "native" else "E3M4"
    recipe = Recipe.uniform(fmt, **settings)
    return tuple(quantize_model(nn.Sequential(layer), recipe) for layer in (conv, linear))


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [True, False])
def test_a_conv1d_is_the_linear_layer_with_its_transpose_to_the_bit(way, autocast):
    found = []
    for model in pair(**WAYS[way]):
        generator = torch.Generator().manual_seed(4)
        for _ in range(2):
            x = torch.randn(6, 5, 48, generator=generator).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = model(x)
            (y.float() * torch.randn(y.shape, generator=generator)).sum().backward()
        layer = model[0]
        assert (layer.in_features, layer.out_features) == (48, 24)
        weight_grad = layer.weight.grad.t() if layer.transposed else layer.weight.grad
        found.append([y, x.grad, weight_grad, layer.bias.grad, *layer.buffers()])
    assert len(found[0]) == len(found[1]) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("way", ["tensor", "row", "block"])
@pytest.mark.parametrize("virtual", [False, True])
@pytest.mark.parametrize("arm", ARMS)
def test_arms_step_it_as_they_step_its_transpose(way, virtual, arm):
    ends = []
    for model in pair(**WAYS[way]):
        if virtual:
            spec = TensorRecipe(format=get_format("E3M4"), virtual=True, **WAYS[way])
            quantize_model(unquantize_model(model), Recipe(rules=(LayerRecipe(weight=spec).on("0"),)))
        optimizer = build_optimizer(model, ARMS[arm], weight_grids(model, on_grid=False))
        generator = torch.Generator().manual_seed(4)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 48, generator=generator)).square().sum().backward()
            optimizer.step()
        ends.append(matrix_of(model[0]).detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


# --- a layer in two places; STACKS.md says what its gradient is -----------------------------------------------


class Twice(nn.Module):
    """One layer under two names, and called in both places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(3 * torch.tanh(self.first(x)))


def test_a_layer_is_replaced_in_each_of_its_places():
    model = quantize_model(Twice(), Recipe.uniform("E4M3"))
    assert isinstance(model.first, QuantizedLinear) and model.second is model.first
    assert list(account(model).quantized) == ["first"]
    unquantize_model(model)
    assert type(model.first) is nn.Linear and model.second is model.first


@pytest.mark.parametrize("loops", [True, False], ids=["loops", "tensor operations"])
def test_its_histories_have_every_call(loops, monkeypatch):
    if not loops:
        monkeypatch.setattr(operand, "has_loops", lambda t: False)
    model = quantize_model(Twice(), Recipe.uniform("E4M3", scaling="delayed", history=4))
    seen = {"input": [], "grad": []}

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["input"].insert(0, inputs[0].abs().max().item())
        output.register_hook(lambda grad: seen["grad"].insert(0, grad.abs().max().item()))

    model.first.register_forward_hook(watch)
    for _ in range(2):
        model(torch.randn(8, 16)).square().sum().backward()
    for role, expected in seen.items():
        assert model.first.quantizers[role].history.tolist() == pytest.approx(expected)
    assert model.first.quantizers["weight"].history.tolist() == [model.first.weight.detach().abs().max().item()] * 4
