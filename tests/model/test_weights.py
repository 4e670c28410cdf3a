"""A layer quantizes the weight that it multiplies with, at that moment, whoever wrote it and however late.

Oracle: a layer whose parameter was set to that weight beforehand. The stacks of STACKS.md have more who write weights.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from altgrad.model import Recipe, linear_layers, quantize_model

pytestmark = pytest.mark.usefixtures("products")

WAYS: dict[str, dict[str, object]] = {
    "tensor": {}, "delayed": {"scaling": "delayed", "history": 3}, "static": {"scaling": "static"},
    "row": {"granularity": "row"}, "block": {"granularity": "block", "scale": "E8M0"},
    "two-level": {"granularity": "block", "block": 16, "scale": "E5M2"},
    "clipped codes": {"gradient": "clipped", "save": "codes"},
}  # fmt: skip


class Inner(nn.Module):
    """The second layer's weight moves within the forward pass, after the first layer's output."""

    def __init__(self, factor: float = 3.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.factor = nn.Linear(48, 32), nn.Linear(32, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            self.second.weight.mul_(self.factor)
        return self.second(x)


X = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_written_between_two_layers_is_seen(way: str) -> None:
    model, expected = (quantize_model(Inner(f), Recipe.uniform("E3M4", **WAYS[way])) for f in (3.0, 1.0))
    with torch.no_grad():
        expected.second.weight.mul_(3.0)
        assert torch.equal(model(X), expected(X))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_is_computed_is_read_once(way: str) -> None:
    """A power iteration goes on whenever the weight is read."""
    model = quantize_model(Inner(1.0), Recipe.uniform("E3M4", **WAYS[way]))
    expected, read = copy.deepcopy(model), []
    parametrizations.spectral_norm(model.first)
    model.first.parametrizations.weight[0].register_forward_hook(lambda *found: read.append(found[-1]))
    found = model(X)
    with torch.no_grad():
        expected.first.weight.copy_(read[0])
        assert torch.equal(found, expected(X)) and len(read) == 1


def test_a_copy_quantizes_its_own_weights() -> None:
    model = quantize_model(Inner(1.0), Recipe.uniform("E3M4"))
    copied, expected = copy.deepcopy(model), model(X)
    with torch.no_grad():
        model.first.weight.zero_()
    assert torch.equal(copied(X), expected) and not torch.equal(model(X), expected)


def test_layers_of_one_format_share_its_constants() -> None:
    layers = linear_layers(quantize_model(Inner(), Recipe.uniform("E3M4"))).values()
    for role in ("input", "weight", "grad"):
        assert len({layer.quantizers[role].constants.data_ptr() for layer in layers}) == 1
