"""Laws of the account: what is quantized, what is left and why, and when too little is to go by the recipe's name.

Oracle: models so small that their weights are counted by hand.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from altgrad.formats import get_format
from altgrad.model import LayerRecipe, Recipe, TensorRecipe, account, quantize_model


class Own(nn.Module):
    """A module with a product of its own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(size, size))
        self.norm = nn.LayerNorm((2, 8))
        self.table = nn.Embedding(1000, 8)


def test_an_account_says_what_is_quantized_what_is_left_and_why(capsys):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Own(4))
    assert account(model).quantized == {}
    with pytest.warns(UserWarning, match=r"11\.1% .* no recipe reaches: 2\.matrix \(Own\)"):
        quantize_model(model, Recipe.uniform("E3M4"), verbose=True)
    found = account(model)
    assert found.quantized == {name: {"weight": "E3M4", "input": "E3M4", "grad": "E5M2"} for name in ("0", "1")}
    assert found.left == {"2.table": "looked up, no product", "2.matrix": "Own: its products are not known"}
    assert found.shares == {"quantized": 128 / 144, "unknown": 16 / 144}
    printed = capsys.readouterr().out
    assert printed == f"{found}\n" and "*          2       E3M4    E3M4   E5M2" in printed


def test_a_layer_without_a_rule_is_left_without_a_warning():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Own(64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_model(model, Recipe(rules=(LayerRecipe(weight=TensorRecipe(format=get_format("E4M3"))).on("0"),)))
    assert account(model).left["1"] == "no rule quantizes it"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.Conv2d(16, 16, 3), "0.weight (Conv2d)"),
        (nn.Bilinear(8, 8, 8), "0.weight (Bilinear)"),
        (nn.MultiheadAttention(16, 2), "0.in_proj_weight (MultiheadAttention)"),
        (nn.LSTM(8, 16), "0.weight_ih_l0 (LSTM)"),
        (Own(64), "0.matrix (Own)"),
    ],
)
def test_a_uniform_that_would_leave_most_products_out_is_refused(module, name):
    model = nn.Sequential(module, nn.Linear(8, 8))
    with pytest.raises(ValueError, match="in name only") as raised:
        quantize_model(model, Recipe.uniform("E4M3"))
    assert name in str(raised.value) and "\n" not in str(raised.value)
    assert type(model[1]) is nn.Linear


def test_a_layer_that_is_never_called_is_not_called_quantized():
    """nn.MultiheadAttention reads the weight of its out_proj itself."""
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 1000))
    with pytest.warns(UserWarning, match="out_proj"):
        quantize_model(model, Recipe.uniform("E4M3"))
    assert list(account(model).quantized) == ["1"]
    said = "MultiheadAttention multiplies with it itself, past the layer"
    assert account(model).left["0.out_proj.weight"] == said


class Around(nn.Module):
    """Multiplies with the weights of layers in it by itself, in every way that is found, and in none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.called, self.named, self.alone, self.both = (nn.Linear(8, 8) for _ in range(4))
        self.inner = nn.Sequential()
        self.inner.deep = nn.Linear(8, 8)

    def forward(self, x):
        x = self.both(self.called(self.table(x).to(self.called.weight.dtype)).view(-1, self.called.weight.size(1)))
        x = F.linear(x @ self.alone.weight.float(), self.inner.deep.weight, bias=self.inner.deep.bias)
        w = self.named.weight.t()
        return torch.einsum("nk,mk->nm", torch.mm(x, w), self.both.weight) @ self.table.weight.T


def test_a_weight_that_other_code_multiplies_with_is_not_called_quantized():
    model = nn.Sequential(Around(), nn.Linear(8, 100), nn.Linear(100, 100))
    read = ["0.alone.weight", "0.both.weight", "0.inner.deep.weight", "0.named.weight", "0.table.weight"]
    with pytest.warns(UserWarning, match=r"0\.alone\.weight \(Around\), 0\.inner\.deep\.weight .* and 1 more"):
        quantize_model(model, Recipe.uniform("E4M3"))
    found = account(model)
    assert found.left == dict.fromkeys(read, "Around multiplies with it itself, past the layer")
    assert sorted(found.unknown) == [name for name in read if "both" not in name]
    assert list(found.quantized) == ["0.called", "0.both", "1", "2"]
    whole = 5 * 64 + 16 * 8 + 100 * 8 + 100 * 100
    assert found.shares == {"quantized": (whole - 3 * 64 - 16 * 8) / whole, "unknown": (3 * 64 + 16 * 8) / whole}
    with pytest.raises(ValueError, match="in name only"):
        quantize_model(Around(), Recipe.uniform("E4M3"))
