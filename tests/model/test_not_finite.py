"""What is not finite going in is not finite coming out, in every recipe, and nothing beyond its scales changes.

Oracle: `nn.Linear`'s own product, which says what cannot be finite; and the quantized layer with zeros in place of the
row, which says what must not change.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.config.recipe import Recipe, Rule
from altgrad.config.tensor_recipe import TensorRecipe
from altgrad.model import QuantizedLinear, quantize_model

pytestmark = pytest.mark.usefixtures("products")

TWO_LEVEL = {"granularity": "block", "block": 16, "scale": "E4M3"}
RECIPES: dict[str, dict[str, Any]] = {
    "tensor": {}, "row": {"granularity": "row"}, "block": {"granularity": "block", "scale": "E8M0"},
    "blocks in float32": {"granularity": "block"}, "tile": {"granularity": "tile", "block": 16},
    "two-level": TWO_LEVEL, "4/6": TWO_LEVEL | {"scale_rounding": "4/6"},
    "powers of two": {"granularity": "row", "scale": "E8M0", "scale_rounding": "even"},
    "delayed": {"scaling": "delayed", "history": 3}, "most recent": {"scaling": "delayed", "reduce": "most-recent"},
    "static": {"scaling": "static"}, "stochastic": {"rounding": "stochastic"},
    "stochastic rows": {"rounding": "stochastic", "granularity": "row"},
    "delayed, stochastic": {"scaling": "delayed", "rounding": "stochastic"},
    "stochastic two-level": TWO_LEVEL | {"rounding": "stochastic"},
    "native": {"backend": "native"}, "native rows": {"backend": "native", "granularity": "row"},
    "codes": {"save": "codes"}, "float32": {"accumulate": "float32"}, "hadamard": {"hadamard": 16},
    "relu": {"gradient": "relu"}, "clipped": {"gradient": "clipped"},
}  # fmt: skip
MS_EDEN = {"rounding": "MS-EDEN", **TWO_LEVEL}
#: Granularities whose scales are of one row of the forward product, and of one column in the weight's gradient.
APART = ("row", "block", "blocks in float32", "powers of two", "stochastic rows", "native rows")
UNUSUAL = (torch.inf, -torch.inf, torch.nan)
PLACES = ((0, 0), (17, 29), (39, 63))


def layer(name: str, *, bias: bool = False) -> QuantizedLinear:
    torch.manual_seed(0)
    options = RECIPES.get(name, {})
    names = ("save", "gradient", "hadamard", "backend", "accumulate")
    of_layer = {key: options[key] for key in names if key in options}
    of_tensor = {key: value for key, value in options.items() if key not in of_layer}
    tensors = {role: TensorRecipe(format="E4M3", **of_tensor) for role in ("weight", "input", "grad")}
    if name == "MS-EDEN":
        tensors = {role: TensorRecipe(format="E2M1", **TWO_LEVEL) for role in tensors}
        tensors["grad"] = TensorRecipe(format="E2M1", **MS_EDEN)
    model = nn.Sequential(nn.Linear(64, 48, bias=bias))
    made = quantize_model(model, Recipe(rules=(Rule(layers="*", **tensors, **of_layer),)))[0]
    assert isinstance(made, QuantizedLinear)
    return made


def passed(made: nn.Module, x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of one pass, the layer's state being as before it."""
    made = copy.deepcopy(made)
    with torch.no_grad():
        made.weight.copy_(weight)
    x = x.clone().requires_grad_()
    y = made(x)
    y.backward(grad)
    return {"y": y.detach(), "input": x.grad, "weight": made.weight.grad}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"input": (40, 64), "weight": (48, 64), "grad": (40, 48)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("seen", ["new", "after steps"])
@pytest.mark.parametrize("name", [*RECIPES, "MS-EDEN"])
def test_not_finite_in_not_finite_out(name: str, seen: str) -> None:
    made, given = layer(name), tensors()
    if seen == "after steps":
        for _ in range(2):
            x = given["input"].clone().requires_grad_()
            made(x).backward(given["grad"])
        made.zero_grad()
    plain = nn.Linear(64, 48, bias=False)
    for training in (True, False):
        made.train(training)
        for role, clean in given.items():
            for place, unusual in zip(PLACES, UNUSUAL, strict=True):
                at = tuple(min(i, size - 1) for i, size in zip(place, clean.shape, strict=True))
                damaged = {name: t.clone() for name, t in given.items()}
                damaged[role][at] = unusual
                found = passed(made, damaged["input"], damaged["weight"], damaged["grad"])
                expected = passed(plain, damaged["input"], damaged["weight"], damaged["grad"])
                for what, t in found.items():
                    hidden = t.isfinite() & ~expected[what].isfinite()
                    if what == "input" and name == "relu":
                        hidden &= damaged["input"] > 0  # its gradient is zero elsewhere
                    assert not hidden.any(), (role, what, at, unusual, training)


@pytest.mark.parametrize("name", APART)
def test_one_that_is_not_finite_leaves_all_others_their_bits(name: str) -> None:
    made, given = layer(name), tensors()
    for place, unusual in zip(PLACES, UNUSUAL, strict=True):
        for role, touched in (("input", {"y": 0}), ("grad", {"input": 0, "weight": 1})):
            row, column = (min(i, size - 1) for i, size in zip(place, given[role].shape, strict=True))
            damaged, clean = ({name: t.clone() for name, t in given.items()} for _ in range(2))
            damaged[role][row, column] = unusual
            for what, dim in touched.items():
                # Zeros in place of all that shares a scale with it: a row, or in the sum over rows a column.
                clean[role] = given[role].clone()
                clean[role][(row, slice(None)) if dim == 0 else (slice(None), column)] = 0.0
                found, expected = (passed(made, t["input"], t["weight"], t["grad"]) for t in (damaged, clean))
                others = torch.ones(len(found[what]), dtype=torch.bool)
                others[row if dim == 0 else column] = False
                assert torch.equal(found[what][others], expected[what][others]), (role, what)
                assert not found[what][~others].isfinite().any()


@pytest.mark.parametrize("name", ["delayed", "most recent", "static"])
@pytest.mark.parametrize("unusual", UNUSUAL)
def test_no_history_takes_it_up(name: str, unusual: float) -> None:
    made, given = layer(name), tensors()
    for damaged in (False, True, False):
        before = {role: quantizer.history.clone() for role, quantizer in made.quantizers.items()}
        x, grad = given["input"].clone(), given["grad"].clone()
        if damaged:
            x[3, 5], grad[7, 2] = unusual, unusual
        y = made(x.requires_grad_())
        y.backward(grad)
        for role, quantizer in made.quantizers.items():
            learns = not damaged or role == "weight"
            assert quantizer.history.isfinite().all() and (learns or torch.equal(quantizer.history, before[role]))
        assert bool(y.isfinite().all()) != damaged  # and the step after is as ever


@pytest.mark.parametrize("name", ["tensor", "row", "block", "two-level", "delayed"])
def test_activations_beyond_float16_are_not_finite(name: str) -> None:
    made = nn.Sequential(layer(name), nn.ReLU(), nn.Linear(48, 8)).half()
    x = torch.full((8, 64), 6e4, dtype=torch.float16)
    with torch.no_grad():
        made[0].weight.fill_(1.0)
        assert not made(x).isfinite().any()
