"""Every arm in a whole run: twins agree, and what is recorded about its updates."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from altgrad.config.cell import scratch_directory
from altgrad.model import linear_layers
from altgrad.model.from_cell import arm_of, build_model
from altgrad.optim import build_optimizer, weight_grids
from tests.optim.arms import ARMS
from tests.training.conftest import VOCABULARY, arm_cell, diagnosed, trained

# Of master weights, of weights on their grid, of what makes up for rounding. What else arms differ in is a step, whose
# laws are in tests/optim: the others' runs are not for every day.
EVERY_DAY = ("spacing_unmatched", "rung", "eco")
ON_GRID = [name for name in EVERY_DAY if ARMS[name]["weights"] == "quantized"]
WHOLE_RUNS = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in ARMS]
WHOLE_RUNS += [f"virtual.{name}" for name in EVERY_DAY]


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_e0m7_and_e1m6_train_to_the_same_bits(tokens, tmp_path, name):
    twin, own = (trained(arm_cell(name, format), tokens, tmp_path / format) for format in ("E0M7", "E1M6"))
    assert all(twin[file] == own[file] for file in ("model.safetensors", "history.csv"))


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("format", ["bf16", "E4M3"])
def test_what_is_never_quantized_learns_alike_in_every_arm_and_format(name, format):
    """A learning rate of its own for embeddings and norms: the scale of the arm's leaves it alone."""
    cell = arm_cell(name, format, plain_lr=0.125).model_copy(update={"lr_scale": 0.5})
    arm, model = arm_of(cell), build_model(cell, VOCABULARY, torch.device("cpu"))
    optimizer = build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"))
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    linear = {layer.weight for name, layer in linear_layers(model).items() if name != "head"}
    assert {rate for p, rate in rates.items() if p not in linear} == {0.125} and len(linear) == 4
    in_its_own_unit = arm.base == "rung" and format == "bf16"  # where it is its plain form
    assert {rates[p] for p in linear} == {0.125 if in_its_own_unit else ARMS[name]["lr"] / 2}


@pytest.mark.parametrize("name", [f"{kind}{name}" for kind in ("", "virtual.") for name in ON_GRID])
def test_a_checkpoint_of_quantized_weights_is_a_byte_per_weight_and_two_on_the_finer_grid(tokens, tmp_path, name):
    cell, virtual = arm_cell(name, "E3M4"), name.startswith("virtual.")
    trained(cell, tokens, tmp_path)
    stored = load_file(scratch_directory(tmp_path, cell, tokens) / "step-00000012.safetensors")
    model = load_file(tmp_path / "out" / "model.safetensors")
    codes = {key.removeprefix("codes/"): t for key, t in stored.items() if key.startswith("codes/")}
    assert len(codes) == 4 and {t.dtype for t in codes.values()} == {torch.int16 if virtual else torch.uint8}
    for key, t in codes.items():
        assert f"model/{key}" not in stored and t.shape == model[key].shape
        assert virtual or len(model[key].unique()) <= 255
    diagnosis, rows = diagnosed(cell, tmp_path / "out", tmp_path)
    assert diagnosis["status"] == "ok" and {"effective_rank", "init_distance"} <= set(rows["metric"])
    if virtual:
        assert len(model["blocks.0.mlp.up.weight"].unique()) > 2 * 255 and diagnosis["summary"]["sqnr_db"] is None
        assert not set(rows["metric"]) & {"sqnr_db", "underflow_frac", "code_usage", "grad_snr_db"}


def test_snapshots_have_the_amax_that_holds_the_scale_and_the_embedding_and_its_head_stay_plain(tokens, tmp_path):
    trained(arm_cell("rung"), tokens, tmp_path)
    probes, model = (load_file(tmp_path / "out" / f"{name}.safetensors") for name in ("probes", "model"))
    held = {key: value for key, value in probes.items() if key.startswith("amax/12/")}
    assert len(held) == 4 and len(model["tokens.weight"].unique()) > 255
    for key, value in held.items():
        assert value == model[f"{key.removeprefix('amax/12/')}.quantizers.weight.history"].squeeze()
    trained(arm_cell("adamw"), tokens, tmp_path / "following")
    assert not any(key.startswith("amax/") for key in load_file(tmp_path / "following" / "out" / "probes.safetensors"))


@pytest.mark.parametrize(("one", "other"), [
    ("adamw", "virtual.adamw"), ("madam", "virtual.madam"), ("muon", "virtual.muon"), ("adamw", "spacing_unmatched")
])  # fmt: skip
def test_arms_that_see_no_format_train_the_same_bits_in_bf16(tokens, tmp_path, one, other):
    """An arm that needs none, in an unquantized control; and one that needs it, as its plain form."""
    cells = (arm_cell(name) if name.startswith("virtual.") else arm_cell(name, "bf16") for name in (one, other))
    found = [trained(cell, tokens, tmp_path / cell.key / name) for cell, name in zip(cells, "ab", strict=True)]
    assert all(found[0][file] == found[1][file] for file in ("model.safetensors", "history.csv"))
    assert json.loads(found[1]["metrics.json"])["quantized_parameters"] == 0
    adamw = trained(arm_cell("adamw", "bf16"), tokens, tmp_path / "adamw")
    assert (found[0]["model.safetensors"] == adamw["model.safetensors"]) == (one == "adamw")


def test_updates_are_recorded(tokens, tmp_path):
    found = {}
    for name in ("adamw", "spacing_unmatched", "spacing_gradient", "rung"):
        trained(arm_cell(name), tokens, tmp_path / name)
        rows = pd.read_parquet(tmp_path / name / "out" / "monitors.parquet")
        found[name] = rows[rows["role"] == "update"]
        assert set(found[name]["step"]) == {1, 5, 10}
        assert (found[name][found[name]["metric"] == "rungs"]["value"] > 0).all()
        assert (found[name][found[name]["metric"] == "update_size"]["value"] > 0).all()
        codes = found[name][found[name]["metric"].isin(["stall_ratio", "update_success"])]
        assert codes["value"].between(0, 1).all() and set(codes["metric"]) == {"stall_ratio", "update_success"}
    cosine = {name: rows[rows["metric"] == "cosine_adamw"]["value"] for name, rows in found.items()}
    assert cosine["adamw"].min() > 0.9999
    assert 0.1 < cosine["spacing_unmatched"].mean() < 0.99
    assert cosine["spacing_gradient"].mean() > cosine["spacing_unmatched"].mean()  # Adam takes the stiffness out again
