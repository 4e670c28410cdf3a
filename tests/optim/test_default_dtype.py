"""Steps of every arm under another default dtype of torch: the bits that they have under float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from altgrad.config.arms import BASES
from altgrad.formats import get_format
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, FormatManifold, build_optimizer, stiffness, update_cpu, weight_grids
from altgrad.optim.stiffness import FORMULAS
from tests.default_dtype import OTHERS, require_same_bits
from tests.optim.arms import ARMS, arm_named

_STATE = {"m": "E4M3", "v": "UE4M4"}
STATES: dict[str, dict[str, Any]] = {
    "maps": {"m": "dynamic8", "v": "unsigned_dynamic8"},
    "4 bits": {"m": {"format": "dynamic4", "block": 128}, "v": {"format": "unsigned_linear4", "block": 128}},
    "stochastic rows": {name: {"format": f, "granularity": "row", "rounding": "stochastic"}
                        for name, f in _STATE.items()},
    "E8M0": {name: {"format": f, "scale": "E8M0", "root": name == "v"} for name, f in _STATE.items()},
    "expanded": {name: {"format": f, "expand": True, "granularity": "tensor"} for name, f in _STATE.items()},
}  # fmt: skip
CASES: dict[str, Arm] = {name: arm_named(name) for name in ARMS} | {
    base: Arm(lr=1e-2, base=base, **({"stiffness": "ulp"} if row.metric else {}))
    for base, row in BASES.items() if row.unit != "rungs"
} | {
    f"{base} {name}": Arm(lr=1e-2, base=base, state={**(found if base == "adamw" else {"m": found["m"]}), "least": 0},
                          **({"momentum": 0.9} if base == "sgd" else {}))
    for base in ("adamw", "sgd") for name, found in STATES.items()
} | {
    "stiff codes": Arm(lr=1e-2, stiffness="ulp", state={**_STATE, "least": 0}),
    "scheduled": Arm(lr=1e-2, stiffness="range", schedule="cosine"),
}  # fmt: skip


def steps(arm: Arm, dtype: torch.dtype, **options: Any) -> list[Any]:
    """Return the weights after some steps, the optimizer's state, and where the next step is wanted to lead."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(8, 64, dtype=dtype), nn.Linear(64, 48, dtype=dtype), nn.LayerNorm(48, dtype=dtype)
    )
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float32) / 8)
    quantize_model(model, Recipe.uniform("E4M3"))
    optimizer = build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"), **options)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).mul_(0.01).to(p.dtype)
        optimizer.step()
    state = [list(kept.values()) for kept in optimizer.state.values()]
    ends = [p.detach() * 1 for p in model.parameters()]  # of codes their values
    return [ends, state, optimizer.wanted(model[1].weight), optimizer.adamw_direction(model[1].weight)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float16", "float64"])  # narrower and wider
@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by", ["loops", "rules"])
def test_a_default_dtype_changes_no_bit_of_a_step(
    name: str, dtype: str, of_weights: torch.dtype, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "rules":
        monkeypatch.setattr(update_cpu, "available", lambda *_: False)
    require_same_bits(lambda: steps(CASES[name], of_weights, reference=True), OTHERS[dtype])


def test_nor_of_a_compiled_rule() -> None:
    arm = arm_named("row_relative")
    require_same_bits(lambda: steps(arm, torch.float32, compiled=True), torch.float16)


@pytest.mark.parametrize("dtype", OTHERS)
def test_stiffness_and_manifold_are_the_same(dtype: str) -> None:
    w = torch.randn(24, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    more: dict[str, dict[str, Any]] = {"foreign": {"foreign": "E5M2"}, "profile": {"knee": 7, "slope": 0.5}}

    def made() -> list[Tensor]:
        manifold = FormatManifold(get_format("E3M4"), 0.7, unit=0.3)
        found = [stiffness(t, "E3M4", name, **more.get(name, {})) for name in FORMULAS for t in (w, w.double())]
        return [*found, *(manifold.egrad2rgrad(t, t) for t in (w, w.double()))]

    require_same_bits(made, OTHERS[dtype])
