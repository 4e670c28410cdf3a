"""A step never waits for the device but once, for its loss and the norm of its gradients. Oracle: the meta device.

It stands for a GPU: what reads its tensors raises, and copies to it are seen. On a GPU `tests/gpu` counts the waits.
Weights that are stored as codes are left out: each reading looks whether all are codes of the format.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from altgrad.config import load_params
from altgrad.config.recipe import Rule
from altgrad.model.from_cell import arm_of, build_model
from altgrad.optim import build_optimizer, weight_grids
from tests.training.conftest import make_cell

ARMS = {name: arm.model_dump() for name, arm in load_params().optimizers.items() if arm.store != "codes"}
BLOCKS = {"granularity": "block", "block": 16, "scale": "E4M3"}
RECIPES: dict[str, dict[str, Any]] = {
    "one scale": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2"},
    "delayed": {"weight": "E4M3", "input": {"format": "E4M3", "scaling": "delayed"}, "grad": "E5M2"},
    "blocks": {"weight": {"format": "E4M3", **BLOCKS}, "input": {"format": "E4M3", **BLOCKS}},
    "by chance": {"weight": "E4M3", "grad": {"format": "E5M2", "rounding": "stochastic"}},
    "rotated": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "hadamard": 16},
    "codes": {"weight": "E4M3", "input": "E4M3", "grad": "E5M2", "save": "codes"},
}


class Made(TorchFunctionMode):
    """Sees what `torch.tensor` and `torch.as_tensor` bring to the device, for which they wait."""

    def __init__(self, waited: list[str]) -> None:
        super().__init__()
        self.waited = waited

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            self.waited += [] if torch.device(kwargs["device"]).type == "cpu" else [f"{func}"]
        return func(*args, **kwargs)


class Copies(TorchDispatchMode):
    """Counts the copies to the device, and those that the program waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device != found.device:
                self.count += 1
                asked = (kwargs or {}).get("non_blocking", args[2] if len(args) > 2 else False)
                self.waited += [] if asked else [f"{func} {tuple(source.shape)}"]
        return found


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the meta device has none."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda *_: torch.bfloat16)


def step(recipe: dict[str, Any], arm: dict[str, Any], passes: bool = True) -> Copies:
    """Take two steps, the second of which is watched; without ``passes`` of gradients that are there."""
    cell = make_cell(arm=arm)
    cell = cell.model_copy(update={"rules": (Rule(layers="*", **recipe),)})
    model = build_model(cell, 48, torch.device("meta"))
    grids = weight_grids(model, on_grid=arm_of(cell).weights == "quantized")
    optimizer = build_optimizer(model, arm_of(cell), grids, steps=4, seed=0, compiled=False)
    tokens = torch.zeros(4, 16, dtype=torch.int64)
    for _ in range(2):
        with Copies() as copies, Made(copies.waited):
            optimizer.zero_grad(set_to_none=True)
            if passes:
                inputs, targets = (tokens.to("meta", non_blocking=True) for _ in range(2))
                model(inputs, targets).backward()
                norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
                nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
            else:
                for p in model.parameters():
                    p.grad = torch.empty_like(p)
            optimizer.step(norm=1.0)
    return copies


@pytest.mark.parametrize("name", ARMS)
def test_no_arm_waits_for_the_device(name: str) -> None:
    assert not step(RECIPES["one scale"], ARMS[name], passes=False).waited


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_waits_for_the_device(name: str) -> None:
    copies = step(RECIPES[name], {"lr": 1e-2})
    assert copies.count and not copies.waited
