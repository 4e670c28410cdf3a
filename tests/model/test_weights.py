"""A layer quantizes the weight that it multiplies with, at that moment, whoever wrote it and however late.

Oracle: an unquantized product of the operands that `quantize` makes of the weight as it stands, or the same layers
called one by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from altgrad.model import GPT, GPTConfig, QuantizedLinear, Recipe, quantize_model, unquantize_model

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


def model(**settings: object) -> GPT:
    torch.manual_seed(0)
    return quantize_model(GPT(CONFIG), Recipe.uniform("E3M4", **settings))


def layers(gpt: nn.Module) -> list[QuantizedLinear]:
    return [module for module in gpt.modules() if isinstance(module, QuantizedLinear)]


def loss_of(gpt: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return gpt(*TOKENS)


# --- who writes a weight -------------------------------------------------------------------------------------------


def pruned(layer: nn.Module) -> None:
    """A hook before the layer's forward pass sets its weight anew."""
    prune.random_unstructured(layer, "weight", 0.5)


def normalised(layer: nn.Module) -> None:
    """The weight is computed from other parameters whenever it is read."""
    parametrizations.weight_norm(layer)
    layer.parametrizations.weight.original0.data.mul_(1.5)


def spectral(layer: nn.Module) -> None:
    parametrizations.spectral_norm(layer)


def noisy(layer: nn.Module) -> None:
    """A hook before the layer's forward pass writes into the weight."""

    def add(module: nn.Module, inputs: object) -> None:
        with torch.no_grad():
            module.weight.add_(0.1 * torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1)))

    layer.register_forward_pre_hook(add)


WRITERS: list[Callable[[nn.Module], None]] = [pruned, normalised, spectral, noisy]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda f: f.__name__)
def test_a_written_weight_is_the_one_that_is_multiplied(writer: Callable[[nn.Module], None], way: str) -> None:
    """As the layer does whose parameter was set to that weight beforehand."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 16))
    quantize_model(made, Recipe.uniform("E3M4", **WAYS[way]))
    expected = copy.deepcopy(made)
    x = torch.randn(32, 48)
    writer(made[0])
    read: list[Tensor] = []  # a power iteration goes on whenever the weight is read, which is once
    for parametrization in made[0].parametrizations.weight if hasattr(made[0], "parametrizations") else ():
        parametrization.register_forward_hook(lambda module, inputs, output: read.append(output))
    found = made(x)
    with torch.no_grad():
        expected[0].weight.copy_(read[0] if read else made[0].weight)
    assert torch.equal(found, expected(x)) and len(read) == (writer in (normalised, spectral))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_written_between_two_layers_is_seen(way: str) -> None:
    """An inner loop: the second layer's weight moves within the forward pass, by the first one's output."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(48, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.no_grad():
                self.second.weight.mul_(3.0)
            y: Tensor = self.second(x)
            return y

    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    made, expected = (quantize_model(Inner(), Recipe.uniform("E3M4", **WAYS[way])) for _ in range(2))
    with torch.no_grad():
        middle = expected.first(x)
        expected.second.weight.mul_(3.0)
        assert torch.equal(made(x), expected.second(middle))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_inside_of_no_grad_have_the_bits_of_a_call_with_gradients(way: str, autocast: bool) -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(64, 96, bias=False), nn.SiLU(), nn.Linear(96, 64, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.net(x).float().sum(), x)[0]

    x, found = torch.randn(64, 64), []
    for enabled in (True, False):
        made = quantize_model(Forces(), Recipe.uniform("E4M3", **WAYS[way]))
        with torch.set_grad_enabled(enabled), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found.append(made(x))
    assert torch.equal(*found)


def test_autocast_that_is_off_inside_leaves_a_layer_its_input_s_dtype() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.out = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            with torch.autocast("cpu", enabled=False):
                y: Tensor = self.out(x.float())
                return y

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert quantize_model(Body(), Recipe.uniform("E4M3"))(torch.randn(4, 32)).dtype == torch.float32


def test_a_step_before_the_backward_pass_is_an_error_as_without_quantization() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for made in (plain, quantize_model(copy.deepcopy(plain), Recipe.uniform("E4M3"))):
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        loss = made(torch.randn(4, 8)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- what a model keeps ---------------------------------------------------------------------------------------------


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


def test_a_model_that_is_plain_again_quantizes_nothing():
    torch.manual_seed(0)
    plain, gpt = GPT(CONFIG), model()
    assert torch.equal(loss_of(unquantize_model(gpt)), loss_of(plain))
    assert not layers(gpt)
    assert unquantize_model(plain) is plain
