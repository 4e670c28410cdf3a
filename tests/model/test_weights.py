"""Weights that are quantized together when a forward pass begins: the bits of each alone, and never outdated ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from altgrad.model import GPT, GPTConfig, QuantizedLinear, Recipe, quantize_model, unquantize_model
from altgrad.model.quantized import linear as layer_module
from altgrad.optim import Arm, build_optimizer
from altgrad.training.grids import weight_grids

pytestmark = pytest.mark.usefixtures("products")

CONFIG = GPTConfig(vocab_size=61, layers=2, width=48, heads=2, context=8)
TOKENS = torch.randint(0, 61, (2, 4, 8), generator=torch.Generator().manual_seed(3))
WAYS = {
    "tensor": {},
    "delayed": {"scaling": "delayed", "history": 3},
    "static": {"scaling": "static"},
    "row": {"granularity": "row"},
    "block": {"granularity": "block", "scale": "E8M0"},
    "two-level": {"granularity": "block", "block": 16, "scale": "E5M2"},
    "clipped codes": {"gradient": "clipped", "save": "codes"},
}


def model(*, together: bool = True, **settings: object) -> GPT:
    torch.manual_seed(0)
    made = quantize_model(GPT(CONFIG), Recipe.uniform("E3M4", **settings))
    if not together:
        made._forward_pre_hooks.clear()
    return made


def layers(gpt: nn.Module) -> list[QuantizedLinear]:
    return [module for module in gpt.modules() if isinstance(module, QuantizedLinear)]


def loss_of(gpt: nn.Module, *, autocast: bool = True) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return gpt(*TOKENS)


@pytest.fixture
def alike(products: str) -> list[int]:
    """The numbers of layers whose weights have operands of one dtype whatever the model computes in.

    The head's input is not quantized: where products can be in bfloat16, it keeps the precision of the compute dtype.
    """
    return [9] if products == "float32" else [1, 8]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers in each call that quantizes weights."""
    found: list[int] = []
    original = layer_module.ready_weights

    def counted(layers, settings):
        found.append(len(layers))
        return original(layers, settings)

    monkeypatch.setattr(layer_module, "ready_weights", counted)
    monkeypatch.setattr("altgrad.model.quantized.weights.ready_weights", counted)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [True, False])
def test_training_is_the_same_to_the_bit(way, autocast, calls, alike):
    losses, states = [], []
    for together in (True, False):
        gpt = model(together=together, **WAYS[way])
        optimizer = build_optimizer(gpt, Arm(lr=1e-2))
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(gpt, autocast=autocast)
            loss.backward()
            optimizer.step(norm=1.0)
            losses.append(loss.item())
        states.append(gpt.state_dict())
    assert losses[:3] == losses[3:]
    assert losses[0] > losses[2]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    assert len(calls) == 3 * len(alike) + 3 * 9  # three steps of nine layers: those alike together, and one per layer


@pytest.mark.parametrize("autocast", [True, False])
def test_alike_weights_take_one_call(autocast, calls, alike):
    gpt = model()
    loss_of(gpt, autocast=autocast)
    assert sorted(calls) == alike
    calls.clear()
    layers(gpt)[0].eval()
    loss_of(gpt, autocast=autocast)
    assert sorted(calls) == sorted([1, *alike[:-1], alike[-1] - 1])


def test_quantized_weights_and_one_that_an_embedding_shares_keep_apart(calls):
    gpt = model()
    for weight, grid in weight_grids(gpt, on_grid=True).items():
        grid.held.fill_(2 * weight.detach().abs().amax())
    apart = copy.deepcopy(gpt)
    apart._forward_pre_hooks.clear()
    assert loss_of(gpt) == loss_of(apart) != loss_of(model())


def test_nothing_is_kept_beyond_the_forward_pass(monkeypatch):
    gpt = model()
    loss_of(gpt)
    assert all(layer.ready is None for layer in layers(gpt))
    monkeypatch.setattr(gpt.norm, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(gpt)
    assert all(layer.ready is None for layer in layers(gpt))


def test_an_update_and_a_layer_by_itself_are_seen():
    gpt, layer = model(), layers(model())[0]
    x = torch.randn(5, layer.in_features)
    before, alone = loss_of(gpt), layer(x)
    with torch.no_grad():
        for module in (*layers(gpt), layer):
            module.weight.mul_(2.0)
    assert loss_of(gpt) != before
    assert torch.equal(layer(x), 2 * alone)


def test_a_copy_of_a_model_quantizes_its_own_weights():
    gpt = model()
    copied = copy.deepcopy(gpt)
    expected = loss_of(gpt)
    with torch.no_grad():
        gpt.blocks[0].mlp.up.weight.zero_()
    assert loss_of(copied) == expected != loss_of(gpt)


def test_layers_of_one_format_share_its_constants():
    quantizers = [layer.quantizers for layer in layers(model())]
    roles = {role: {found[role].constants.data_ptr() for found in quantizers if role in found}
             for role in ("input", "weight", "grad")}  # fmt: skip
    assert all(len(found) == 1 for found in roles.values())


def test_a_model_that_is_plain_again_quantizes_nothing(calls):
    torch.manual_seed(0)
    plain, gpt = GPT(CONFIG), model()
    assert torch.equal(loss_of(unquantize_model(gpt)), loss_of(plain))
    assert not calls and not layers(gpt)
    assert unquantize_model(plain) is plain
