"""What-if analyses of tensors, and the recipe that they end in.

Oracles: ml_dtypes' and torch's casts to float8, finite differences, values worked out by hand, and the project's own
reading of params.yaml.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from altgrad.config import Resolver, load_params
from altgrad.diagnostics.what_if import (
    GRANULARITIES,
    SPLITS,
    Probed,
    as_yaml,
    recommended,
    rounded,
    spec_of,
    tensor_error,
    what_if,
)
from altgrad.model import QuantizedLinear
from altgrad.model.from_cell import recipe_of

ROOT = Path(__file__).parents[2]
NATIVE = {"E4M3": (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn), "E5M2": (ml_dtypes.float8_e5m2, torch.float8_e5m2)}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sqnr_db(t: torch.Tensor, fmt: str, granularity: str = "tensor", rounding: str = "nearest-even") -> float:
    spec = spec_of(fmt, granularity)
    return tensor_error(t, rounded(t, spec, rounding), spec).sqnr_db


def layer(seed: int = 0, tokens: int = 12) -> Probed:
    return Probed(normal(8, 32, seed=seed), normal(tokens, 32, seed=seed + 1), 1e-3 * normal(tokens, 8, seed=seed + 2))


@pytest.mark.parametrize("fmt", NATIVE)
@pytest.mark.parametrize("cast", ["ml_dtypes", "torch"])
def test_the_sqnr_is_that_of_a_cast_by_others(fmt: str, cast: str) -> None:
    t = normal(64, 48)
    numpy_type, torch_type = NATIVE[fmt]
    scale = np.float32({"E4M3": 448.0, "E5M2": 57344.0}[fmt] / t.abs().max().double().item())
    scaled = t.numpy() * scale
    as_cast = scaled.astype(numpy_type).astype(np.float64)
    if cast == "torch":
        as_cast = torch.from_numpy(scaled).to(torch_type).double().numpy()
    noise = as_cast / np.float64(scale) - t.numpy().astype(np.float64)
    expected = 10 * math.log10((t.numpy().astype(np.float64) ** 2).sum() / (noise**2).sum())
    assert sqnr_db(t, fmt) == pytest.approx(expected, abs=1e-4)


def test_errors_worked_out_by_hand() -> None:
    # E0M7 has steps of 2^-6 up to 127/64; an amax of 127/64 has scale 1. 0.005 goes to 0, 1/64 + 0.004 to 1/64.
    t = torch.tensor([[127 / 64, 0.005, 1 / 64 + 0.004, 0.0]])
    spec = spec_of("E0M7", "tensor")
    found = tensor_error(t, rounded(t, spec), spec)
    signal, noise = (127 / 64) ** 2 + 0.005**2 + (1 / 64 + 0.004) ** 2, 0.005**2 + 0.004**2
    assert found.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    assert (found.underflow_frac, found.overflow_frac) == (1 / 3, 0)


def test_the_rule_of_ocp_saturates_and_rounding_down_does_not() -> None:
    # An amax of 1.9 has floor(log2) 0, so the OCP scale is 2^8 in E4M3: 486.4 exceeds 448; down takes 2^7.
    t = torch.tensor([[1.9, 0.5] + [0.25] * 30])
    overflow = {}
    for granularity in ("block", "block_floor"):
        spec = spec_of("E4M3", granularity)
        overflow[granularity] = tensor_error(t, rounded(t, spec), spec).overflow_frac
    assert overflow == {"block": 0, "block_floor": 1 / 32}


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rounding_to_nearest_has_the_highest_sqnr_whatever_power_of_two_scales_the_tensor(granularity: str) -> None:
    t = normal(16, 32)
    for fmt in SPLITS:
        nearest = sqnr_db(t, fmt, granularity)
        assert nearest >= sqnr_db(t, fmt, granularity, "stochastic")
        assert nearest == pytest.approx(sqnr_db(t * 2.0**-9, fmt, granularity), abs=1e-9)


def test_tensors_of_zeros_and_of_values_without_error_are_told_apart() -> None:
    spec = spec_of("E0M7", "tensor")
    zeros, exact = torch.zeros(2, 4), torch.tensor([[127 / 64, 1 / 64]])
    assert math.isnan(tensor_error(zeros, rounded(zeros, spec), spec).sqnr_db)
    assert tensor_error(exact, rounded(exact, spec), spec).sqnr_db == math.inf


def test_the_loss_change_of_first_order_is_the_derivative() -> None:
    probed = layer()
    x, target = probed.input.double(), normal(12, 8, seed=9).double()

    def loss(weight: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return (seen @ weight.T - target).square().sum(1).mean()

    weight = probed.weight.double()
    output = x @ weight.T
    grad = 2 * (output - target) / len(x)
    probed = Probed(weight, x, grad)
    for role, at in (("weight", weight), ("input", x)):
        error = 1e-6 * normal(*at.shape, seed=4).double()
        moved = loss(weight + error, x) if role == "weight" else loss(weight, x + error)
        assert probed.loss_change(role, error)[0] == pytest.approx((moved - loss(weight, x)).item(), rel=1e-4)


def test_the_loss_change_of_second_order_by_hand() -> None:
    # Two tokens: per-token gradients are N g a^T = [[2*1*3]] and [[2*2*5]]; F is the mean of their squares.
    probed = Probed(torch.tensor([[7.0]]), torch.tensor([[3.0], [5.0]]), torch.tensor([[1.0], [2.0]]))
    assert probed.loss_change("weight", torch.tensor([[0.1]]))[1] == pytest.approx(0.5 * 0.01 * (6**2 + 20**2) / 2)
    # Of an input: N (g w)^2 for each token.
    changed = probed.loss_change("input", torch.tensor([[0.1], [0.0]]))[1]
    assert changed == pytest.approx(0.5 * 0.01 * 2 * 7.0**2)
    assert all(math.isnan(x) for x in probed.loss_change("grad", torch.tensor([[0.1], [0.0]])))


@cache
def table() -> pd.DataFrame:
    """An evenly spread weight, a bell-shaped input, and gradients with an outlier."""
    outliers = normal(64, 16)
    outliers[0, 0] = 50.0
    even = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
    usual = Probed(even, normal(64, 32), outliers)
    return what_if({"blocks.0.mlp.up": usual, "blocks.0.mlp.down": usual, "head": usual})


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_recommended_recipe_is_read_by_params_and_quantizes_as_it_says(granularity: str, tmp_path: Path) -> None:
    assert len(table()) == 3 * 3 * len(SPLITS) * len(GRANULARITIES) * 2
    recipe = recommended(table(), granularity)
    text = as_yaml(recipe)
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["recipes"] |= YAML(typ="safe").load(text)["recipes"]
    params["grid"]["formats"] = ["bf16", "what_if"]
    with open(tmp_path / "params.yaml", "w", encoding="utf-8") as file:
        yaml.dump(params, file)
    cell = next(c for c in Resolver(load_params(tmp_path / "params.yaml")).cells() if c.format == "what_if")
    layers = ["blocks.0.mlp.up", "blocks.0.mlp.down", "head"]
    read = recipe_of(cell).match(layers)
    assert read == recipe.match(layers)
    # What a layer of that recipe multiplies by is what the table measured.
    made = QuantizedLinear.from_linear(torch.nn.Linear(32, 16, bias=False), read["blocks.0.mlp.up"])
    with torch.no_grad():
        made.weight.copy_(normal(16, 32))
    taken = made.weight_operands(made.weight, made.settings(torch.float32), made.operand_state("weight")).forward
    values = taken.values.float() / (1 if taken.scale is None else taken.scale)
    assert torch.equal(values, rounded(made.weight.detach(), read["blocks.0.mlp.up"].weight))


def test_the_recommendation_suits_each_tensor() -> None:
    found = recommended(table()).match(["blocks.0.mlp.up", "blocks.0.mlp.down", "head"])
    up, head = found["blocks.0.mlp.up"].format_names(), found["head"].format_names()
    assert up["weight"] == "E0M7"  # evenly spread; E1M6 has the same values, and comes later
    assert up["input"] in ("E2M5", "E3M4")  # bell-shaped
    assert up["grad"] in ("E3M4", "E4M3")
    assert head == {"weight": "E0M7", "input": None, "grad": up["grad"]}
