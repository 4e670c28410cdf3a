"""Virtual geometry: an arm sees a format's quantization grid at weights that no product quantizes to it.

Oracle: the run in the format, for what the arm does. `test_arms.py` compares whole runs with unquantized ones.
"""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

from altgrad.formats import get_format
from altgrad.model import (
    LayerRecipe,
    Recipe,
    TensorRecipe,
    linear_layers,
    quantize_model,
    unquantize_model,
    virtual_weight,
)
from altgrad.model.from_cell import arm_of, build_model
from altgrad.optim import build_optimizer, weight_grids
from tests.optim.arms import ARMS, EXTREMES
from tests.training.conftest import VOCABULARY, arm_cell, make_cell, trained, with_weight

MASTER = [name for name, arm in ARMS.items() if arm["weights"] == "master"]
CPU = torch.device("cpu")


def stepped(cell, steps=3):
    """Return the linear layers' weights after steps on gradients that depend on nothing but the step."""
    model, arm = build_model(cell, VOCABULARY, CPU), arm_of(cell)
    grids = weight_grids(model, on_grid=False)
    optimizer = build_optimizer(model, arm, grids, steps=9, seed=3, reference=True)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = 0.01 * torch.randn(p.shape, generator=generator)
        optimizer.step()
    return {name: layer.weight.detach() for name, layer in linear_layers(model).items()}


SPECS = ({"granularity": "row"}, {"scale": "E8M0"},
         *({"granularity": "block", "scale": name} for name in ("E8M0", "E4M3")))  # fmt: skip
CASES = [
    *((name, "E4M3", {}) for name in MASTER),
    *(("spacing_unmatched", format, {}) for format in EXTREMES if format != "E4M3"),
    *(("spacing_unmatched", "E3M4", spec) for spec in SPECS),
]


@pytest.mark.parametrize(("name", "format", "spec"), CASES)
def test_a_step_is_that_in_the_format_to_the_bit(name, format, spec):
    """For the same weights and gradients: master weights know of a format what their arm sees of it."""
    cell = arm_cell(name, format)
    there, here = (stepped(with_weight(cell, virtual=virtual, **spec)) for virtual in (False, True))
    assert all(torch.equal(there[layer], here[layer]) for layer in there)
    if spec:  # whose scales it has
        plain = stepped(arm_cell(f"virtual.{name}", format))
        assert not torch.equal(here["blocks.0.attn.qkv"], plain["blocks.0.attn.qkv"])
    elif ARMS[name]["stiffness"] in ("ulp", "permuted") and format not in ("E0M7", "E1M6"):
        free = stepped(make_cell("bf16", arm=cell.arm.model_dump()))
        assert not any(torch.equal(free[layer], here[layer]) for layer in here if layer != "head")


def test_rungs_are_counted_in_the_formats(tokens, tmp_path):
    """`rung` of two rungs per step at most moves no weight further on finer rungs, decay and roundings aside."""
    means = {}
    for name in ("rung", "virtual.rung"):
        trained(arm_cell(name, "E3M4", lr=0.5, max_rungs=2), tokens, tmp_path / name)
        rows = pd.read_parquet(tmp_path / name / "out" / "monitors.parquet")
        rungs = rows[(rows["role"] == "update") & (rows["metric"] == "rungs")]
        assert set(rungs["step"]) == {1, 5, 10} and len(rungs) == 3 * 4
        means[name] = rungs["value"].mean()
    assert means["virtual.rung"] == pytest.approx(means["rung"], rel=0.25)


def test_layers_may_be_virtual_and_quantized_side_by_side(tokens, tmp_path):
    """Each by its own rule: `rung` counts in the format's rungs, whatever its weights lie on."""
    cell = arm_cell("virtual.rung", "E3M4")
    mlp = arm_cell("rung", "E3M4").rules[0].model_copy(update={"layers": "blocks.*.mlp.*"})
    cell = cell.model_copy(update={"rules": [*cell.rules, mlp]})
    model = build_model(cell, VOCABULARY, CPU)
    grids = weight_grids(model, on_grid=True)
    layers = {name: layer.weight for name, layer in linear_layers(model).items() if layer.weight in grids}
    refinements = {name: grids[weight].refinement for name, weight in layers.items()}
    assert {name: found for name, found in refinements.items() if "mlp" in name} == {
        "blocks.0.mlp.up": 1, "blocks.0.mlp.down": 1,
    }  # fmt: skip
    assert {found for name, found in refinements.items() if "attn" in name} == {256}
    trained(cell, tokens, tmp_path)
    rows = pd.read_parquet(tmp_path / "out" / "monitors.parquet")
    rungs = rows[(rows["metric"] == "rungs")].groupby("layer")["value"].mean()
    assert rungs.max() < 3 * rungs.min()


def test_a_model_gets_virtual_geometry_once_and_loses_it_with_all_else():
    virtual = TensorRecipe(format=get_format("E3M4"), virtual=True)
    recipe = Recipe(rules=(LayerRecipe(weight=virtual).on("*"),))
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    assert quantize_model(model, recipe) is model and virtual_weight(model[0]) == virtual
    assert set(weight_grids(model, on_grid=False)) == {model[0].weight, model[2].weight}
    assert recipe.rules[0].layer.virtual_weight == virtual and not recipe.rules[0].layer.quantizes
    with pytest.raises(ValueError, match="already quantized"):
        quantize_model(model, recipe)
    assert weight_grids(unquantize_model(model), on_grid=False) == {} and virtual_weight(model[0]) is None
