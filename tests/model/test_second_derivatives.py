"""Second derivatives of quantized layers: those of the straight-through estimator.

Oracle: a product whose backward pass is written in torch's own operations, on tensors that `quantize` rounds with the
straight-through estimator, so that autograd differentiates it again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn

from altgrad.config.recipe import Recipe, Rule
from altgrad.config.tensor_recipe import TensorRecipe
from altgrad.formats import get_format
from altgrad.model import quantize_model
from altgrad.numerics import format_constants, operand_scale, quantize
from altgrad.numerics.constants import HADAMARD_SIGNS

pytestmark = pytest.mark.usefixtures("products")

RECIPES: dict[str, dict[str, Any]] = {
    "tensor": {}, "row": {"granularity": "row"}, "block": {"granularity": "block", "scale": "E8M0"},
    "tile": {"granularity": "tile", "block": 16}, "two-level": {"granularity": "block", "block": 16, "scale": "E4M3"},
    "codes": {"save": "codes"}, "relu": {"gradient": "relu"}, "hadamard": {"hadamard": 16},
    "delayed": {"scaling": "delayed"}, "clipped": {"scaling": "delayed", "gradient": "clipped"},
}  # fmt: skip
FORMATS = {"input": "E4M3", "weight": "E3M4", "grad": "E5M2"}
#: Of delayed scaling: amax values before the first step, so that some inputs and weights are clipped.
REMEMBERED = {"input": 1.0, "weight": 0.1}


def scale_of(t: Tensor, role: str, dim: int, options: dict[str, Any]) -> Tensor:
    kind = {name: value for name, value in options.items() if name in ("granularity", "block")}
    remembered = torch.tensor(REMEMBERED[role]) if "scaling" in options and role in REMEMBERED else None
    constants = format_constants(FORMATS[role], scale_format=options.get("scale", "float32"))
    scale_format = {"scale_format": options.get("scale", "float32")}
    return operand_scale(t.detach(), constants, remembered, dim=dim, **kind, **scale_format)


def rounded(t: Tensor, role: str, dim: int, options: dict[str, Any]) -> Tensor:
    clips = options.get("gradient") == "clipped" and role != "grad"
    gradient = "clipped" if clips else "relu" if options.get("gradient") == "relu" and role == "input" else None
    return quantize(t, FORMATS[role], scale=scale_of(t, role, dim, options), gradient=gradient or "straight-through")


def turned(t: Tensor, options: dict[str, Any]) -> Tensor:
    """Return 16 neighbouring rows rotated, by the matrix; the rows that fill the last 16 are zero."""
    if "hadamard" not in options:
        return t
    matrix = torch.tensor(hadamard(16), dtype=torch.float32) * torch.tensor(HADAMARD_SIGNS, dtype=torch.float32) / 4
    padded = nn.functional.pad(t, (0, 0, 0, -len(t) % 16))
    return (matrix @ padded.unflatten(0, (-1, 16))).flatten(0, 1)


def passes(t: Tensor, role: str, options: dict[str, Any]) -> Tensor:
    """Return where the gradient of ``t`` passes its rounding, as numbers."""
    if options.get("gradient") == "relu" and role == "input":
        return (t > 0).float()
    if options.get("gradient") == "clipped":
        largest = get_format(FORMATS[role]).max
        return ((t * scale_of(t, role, 1, options)).abs() <= largest).float()
    return torch.ones_like(t)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = options
        return rounded(x, "input", 1, options) @ rounded(weight, "weight", 1, options).t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), options = ctx.saved_tensors, ctx.options
        dx = rounded(g, "grad", 1, options) @ rounded(weight, "weight", 0, options)
        # Rounding comes after the rotation, and what its estimator lets through after both.
        dw = rounded(turned(g, options), "grad", 0, options).t() @ rounded(turned(x, options), "input", 0, options)
        return dx * passes(x, "input", options), dw * passes(weight, "weight", options), None


class Reference(nn.Module):
    def __init__(self, weight: Tensor, options: dict[str, Any]) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(weight.detach().clone()), options

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, self.weight, self.options)
        return y


def pair(name: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return two quantized layers with tanh between them, and the reference of both."""
    options = RECIPES[name]
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 32, bias=False))
    of_layer = {key: options[key] for key in ("save", "gradient", "hadamard") if key in options}
    of_tensor = {key: value for key, value in options.items() if key not in of_layer}
    kinds = {role: of_tensor | ({"scaling": "dynamic"} if role == "grad" else {}) for role in FORMATS}
    tensors = {role: TensorRecipe(format=fmt, **kinds[role]) for role, fmt in FORMATS.items()}
    quantize_model(made, Recipe(rules=(Rule(layers="*", accumulate="float32", **tensors, **of_layer),)))
    for layer in (made[0], made[2]):
        for role, amax in REMEMBERED.items():
            if layer.quantizers[role].history is not None:
                layer.quantizers[role].history.fill_(amax)
    return made, nn.Sequential(Reference(made[0].weight, options), nn.Tanh(), Reference(made[2].weight, options))


def penalised(model: nn.Module, x: Tensor, *, residual: bool = False) -> list[Tensor]:
    """Return the gradients of a loss with gradients in it, of the input and of weights, in all that it depends on."""
    x = x.clone().requires_grad_()
    y = model(x) + (x if residual else 0)
    loss = y.square().sum()
    of_x, *of_weights = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
    total = (of_x.norm(dim=1) - 1).square().sum() + sum((g.square() * 0.1).sum() for g in of_weights) + loss
    return list(torch.autograd.grad(total, [x, *model.parameters()]))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_second_derivatives_are_those_of_the_straight_through_estimator(name: str, residual: bool) -> None:
    made, reference = pair(name)
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    found, expected = (penalised(model, x, residual=residual) for model in (made, reference))
    assert [relative(a, b) < 1e-4 for a, b in zip(found, expected, strict=True)] == [True] * 3


REFUSED = {
    "delayed": ({"scaling": "delayed"}, "take scaling: dynamic for grad"),
    "static": ({"scaling": "static"}, "take scaling: dynamic for grad"),
    "MS-EDEN": ({"granularity": "block", "block": 16, "scale": "E4M3", "rounding": "MS-EDEN"}, "MS-EDEN rotates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_that_have_no_second_derivative_say_so(name: str) -> None:
    grad, words = REFUSED[name]
    plain = {key: value for key, value in grad.items() if key not in ("rounding", "scaling")}
    forward = {role: TensorRecipe(format="E2M1", **plain) for role in ("weight", "input")}
    made = nn.Sequential(nn.Linear(32, 32))
    quantize_model(made, Recipe(rules=(Rule(layers="*", **forward, grad=TensorRecipe(format="E2M1", **grad)),)))
    x = torch.randn(8, 32, requires_grad=True)
    (g,) = torch.autograd.grad(made(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=words):
        g.square().sum().backward()


def test_a_third_derivative_says_so() -> None:
    made = quantize_model(nn.Sequential(nn.Linear(32, 32)), Recipe.uniform("E4M3"))
    x = torch.randn(8, 32, requires_grad=True)
    (g,) = torch.autograd.grad(made(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first and second derivatives"):
        torch.autograd.grad(g.pow(2).sum(), x, create_graph=True)
