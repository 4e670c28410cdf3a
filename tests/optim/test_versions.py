"""A step between a forward pass and its backward pass is an error, as with torch's default AdamW."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from altgrad.config.bases import BASES
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, build_optimizer, update_cpu
from altgrad.optim.code_weights import CodeWeight
from tests.optim.arms import ARMS, arm_named

STATE = {"state": {"m": "E4M3", "v": "UE4M4", "least": 0}}
_BASES = {base: Arm(lr=1e-2, base=base, **({"stiffness": "ulp"} if row.metric else {}))
          for base, row in BASES.items() if row.unit != "rungs"}  # fmt: skip
CASES = _BASES | {name: arm_named(name) for name in ARMS} | {
    "momentum": Arm(lr=1e-2, base="sgd", momentum=0.9),
    "sgd in codes": Arm(lr=1e-2, base="sgd", momentum=0.9, state={"m": "E4M3", "least": 0}),
    "in codes": Arm(lr=1e-2, **STATE), "spacing, in codes": Arm(lr=1e-2, stiffness="ulp", **STATE),
    "maps": Arm(lr=1e-2, state={"m": "dynamic4", "v": "dynamic8", "least": 0}),
    "stored": arm_named("eco", store="codes"),
}  # fmt: skip


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32, bias=False, dtype=dtype), nn.Linear(32, 32, bias=False, dtype=dtype))


def require_refused(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    """Raise where a backward pass after a step goes on; its error is torch's own."""
    for _ in range(2):  # a first step makes the state
        loss = model(torch.randn(4, 32, dtype=dtype, requires_grad=True)).square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_torchs_own_is_refused() -> None:
    model = model_of(torch.float32)
    require_refused(model, torch.optim.AdamW(model.parameters()), torch.float32)


@pytest.mark.filterwarnings("ignore:this model has no quantized weight")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_step_between_forward_and_backward_is_refused(name: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    require_refused(model, build_optimizer(model, CASES[name]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "by"), [*product(CASES, ("loops", "rules")), ("spacing_unmatched", "compiled")])
def test_so_is_a_step_on_the_quantization_grid(
    name: str, by: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of weights that a plain layer reads too, since a quantized one keeps operands of its own."""
    if by != "loops":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    model = model_of(dtype)
    optimizer = build_optimizer(quantize_model(model, Recipe.uniform("E4M3")), CASES[name], compiled=by == "compiled")
    before = [p._version for p in model.parameters()]
    model(torch.randn(4, 32, dtype=dtype)).sum().backward()
    optimizer.step()
    assert all(p._version > version for p, version in zip(model.parameters(), before, strict=True))
    shared = nn.Linear(32, 32, bias=False)
    shared.weight = model[0].weight
    require_refused(shared, optimizer, shared.weight.dtype)
    assert isinstance(shared.weight, CodeWeight) == (CASES[name].store == "codes")


def test_a_step_that_is_skipped_leaves_the_versions() -> None:
    model = model_of(torch.float32)
    optimizer = build_optimizer(model, Arm(lr=1e-2))
    loss = model(torch.randn(4, 32)).square().sum()
    loss.backward(retain_graph=True)
    model[0].weight.grad[0, 0] = torch.nan
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    loss.backward()
