"""The recipes, the small model and what compares two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from altgrad.model import Recipe, quantize_model
from tests.model import fully_sharded

RECIPES = fully_sharded.RECIPES
Run = Callable[[nn.Module], Any]
INPUTS = [torch.randn(32, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def plain(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


def recipe_of(name: str) -> Recipe:
    return Recipe.uniform("E4M3", grad="E5M2", **RECIPES[name])


def quantized(recipe: str, model: Any = None) -> Any:
    model = plain() if model is None else model
    return quantize_model(model, recipe_of(recipe))


def passes(model: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return outputs and weights' gradients of three passes; a bias has a sum, whose order compilers choose."""
    found: list[Tensor] = []
    for x in INPUTS:
        model.zero_grad()
        y = model(x.to(dtype).clone().requires_grad_())
        y.float().square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.ndim == 2)]
    return found


def require_same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def eager(model: nn.Module) -> Any:
    return model


def traced(model: nn.Module) -> Any:
    """Return ``model`` compiled up to the code that Inductor would write, which tests/training compares."""
    return torch.compile(model, backend="aot_eager")


WAYS: dict[str, Run] = {"eager": eager, "compiled": traced}
