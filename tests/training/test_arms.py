"""Every arm in a whole run: twins agree, an interruption leaves no trace, and what is recorded about its updates."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from altgrad.config import UserError
from altgrad.config.cell import scratch_directory
from altgrad.model import linear_layers
from altgrad.model.from_cell import arm_of, build_model
from altgrad.numerics import quantize
from altgrad.numerics.sums import UpdateSums
from altgrad.optim import build_optimizer
from altgrad.optim.checks import check_cells
from altgrad.training.grids import weight_grids
from altgrad.training.monitor import UpdateMonitor, moved, update_statistics
from tests.optim.arms import ARMS
from tests.training.conftest import VOCABULARY, make_cell, resumed, trained
from tests.training.test_virtual_geometry import cell_of as virtual_cell_of

ON_GRID = [name for name, arm in ARMS.items() if arm["weights"] == "quantized"]
# Of master weights, of weights on their grid, of what makes up for rounding. What else arms differ in is a step, whose
# laws are in tests/optim: the others' runs are not for every day.
EVERY_DAY = ("spacing_unmatched", "rung", "eco")
WHOLE_RUNS = [name if name in EVERY_DAY else pytest.param(name, marks=pytest.mark.slow) for name in ARMS]
WHOLE_RUNS += [f"virtual.{name}" for name in EVERY_DAY]
CHECKPOINT = "step-00000012.safetensors"


def cell_of(name, format="E4M3", **changes):
    """Return a cell of an arm; that of ``virtual.NAME`` sees the format and quantizes nothing."""
    if name.startswith("virtual."):
        return virtual_cell_of(name.removeprefix("virtual."), format)
    arm = {**ARMS[name], **changes}
    if arm["foreign"] is not None:
        arm["foreign"] = "E5M2"  # which the cell's gradients have
    return make_cell(format, arm=arm)


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_e0m7_and_e1m6_train_to_the_same_bits_and_so_does_an_interrupted_run(tokens, tmp_path, monkeypatch, name):
    twin, own = (trained(cell_of(name, format), tokens, tmp_path / format) for format in ("E0M7", "E1M6"))
    assert all(twin[file] == own[file] for file in ("model.safetensors", "history.csv"))
    assert resumed(cell_of(name, "E1M6"), tokens, tmp_path / "interrupted", monkeypatch) == own


@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("format", ["bf16", "E4M3"])
def test_what_is_never_quantized_learns_alike_in_every_arm_and_format(name, format):
    """A learning rate of its own for embeddings and norms: the scale of the arm's leaves it alone."""
    cell = cell_of(name, format, plain_lr=0.125).model_copy(update={"lr_scale": 0.5})
    arm, model = arm_of(cell), build_model(cell, VOCABULARY, torch.device("cpu"))
    optimizer = build_optimizer(model, arm, weight_grids(model, on_grid=arm.weights == "quantized"))
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    linear = {layer.weight for name, layer in linear_layers(model).items() if name != "head"}
    assert {rate for p, rate in rates.items() if p not in linear} == {0.125} and len(linear) == 4
    in_its_own_unit = arm.base == "rung" and format == "bf16"  # where it is its plain form
    assert {rates[p] for p in linear} == {0.125 if in_its_own_unit else ARMS[name]["lr"] / 2}


@pytest.mark.parametrize("name", [name for name in EVERY_DAY if name in ON_GRID])
def test_a_checkpoint_of_quantized_weights_is_a_byte_per_weight(tokens, tmp_path, name):
    cell = cell_of(name, "E3M4")
    trained(cell, tokens, tmp_path)
    stored = load_file(scratch_directory(tmp_path, cell, tokens) / CHECKPOINT)
    model = load_file(tmp_path / "out" / "model.safetensors")
    codes = {key.removeprefix("codes/"): t for key, t in stored.items() if key.startswith("codes/")}
    assert len(codes) == 4 and all(t.dtype == torch.uint8 for t in codes.values())
    for key, t in codes.items():
        assert f"model/{key}" not in stored and t.shape == model[key].shape
        assert len(model[key].unique()) <= 255


def test_snapshots_have_the_amax_that_holds_the_scale_and_the_embedding_and_its_head_stay_plain(tokens, tmp_path):
    trained(cell_of("rung"), tokens, tmp_path)
    probes, model = (load_file(tmp_path / "out" / f"{name}.safetensors") for name in ("probes", "model"))
    held = {key: value for key, value in probes.items() if key.startswith("amax/12/")}
    assert len(held) == 4 and len(model["tokens.weight"].unique()) > 255
    for key, value in held.items():
        assert value == model[f"{key.removeprefix('amax/12/')}.quantizers.weight.history"].squeeze()
    trained(cell_of("adamw"), tokens, tmp_path / "following")
    assert not any(key.startswith("amax/") for key in load_file(tmp_path / "following" / "out" / "probes.safetensors"))


@pytest.mark.parametrize("name", ["madam", "muon", "tensor_relative"])
def test_an_arm_that_needs_no_format_is_itself_in_every_entry(tokens, tmp_path, name):
    """In bf16 it trains as in an unquantized control, to the bit, and not as AdamW."""
    found = {entry: trained(cell, tokens, tmp_path / entry)["model.safetensors"] for entry, cell in {
        "bf16": cell_of(name, "bf16"), "virtual": cell_of(f"virtual.{name}"), "adamw": cell_of("adamw", "bf16"),
    }.items()}  # fmt: skip
    assert found["bf16"] == found["virtual"] != found["adamw"]


def test_without_quantized_weights_an_arm_trains_as_its_plain_form(tokens, tmp_path):
    found = [trained(cell_of(name, "bf16"), tokens, tmp_path / name) for name in ("adamw", "spacing_unmatched")]
    assert found[0]["model.safetensors"] == found[1]["model.safetensors"]


def test_updates_are_recorded(tokens, tmp_path):
    found = {}
    for name in ("adamw", "spacing_unmatched", "spacing_gradient", "rung"):
        trained(cell_of(name), tokens, tmp_path / name)
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


def test_statistics_of_a_step_are_shares_and_means_of_its_sums():
    sums = UpdateSums(wanted=8, stalled=6, flips=3, descending=2, gap=2.5, counts=[2, *[0] * 14, 3, 5],
                      rungs=[1.0, *[0.0] * 14, 6.0, 3.0])  # fmt: skip
    assert update_statistics(sums) == {
        "rungs": 1.0, "representability_gap": 0.25, "stall_ratio": 0.75, "update_success": pytest.approx(2 / 3),
        "rungs_2^-16": 0.5, "rungs_2^-1": 2.0, "rungs_2^0": 0.6,
    }  # fmt: skip
    nothing = UpdateSums(0, 0, 0, 0, 0.0, [10], [0.0])
    assert not {"stall_ratio", "update_success"} & update_statistics(nothing).keys()
    assert moved(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == {"update_l2": 0.5, "update_size": 0.1}
    assert "update_size" not in moved(torch.zeros(2), torch.ones(2))


@pytest.mark.parametrize("name", ["adamw", "adamw_sr_weights"])
def test_what_is_recorded_of_a_step_is_what_its_weights_and_gradient_say(name):
    """Layer by layer from the weights before and after, quantized by `quantize`; both regimes.

    A first step of AdamW wants the sign of the gradient: m / sqrt(v) with one gradient in both.
    """
    cell = cell_of(name)
    model = build_model(cell, VOCABULARY, torch.device("cpu"))
    grids = weight_grids(model, on_grid=name == "adamw_sr_weights")
    optimizer = build_optimizer(model, arm_of(cell), grids, steps=9, seed=0, reference=True)
    generator = torch.Generator().manual_seed(1)
    layers, rows = linear_layers(model), []
    for p in model.parameters():
        p.grad = 0.01 * torch.randn(p.shape, generator=generator)
    for group in optimizer.param_groups:
        group["lr"] = 0.3 * group["lr"]  # so small that some codes stay
    before = {layer: module.weight.detach().clone() for layer, module in layers.items()}
    held = {layer: None if grid.held is None else grid.held.item() for layer, module in layers.items()
            if (grid := grids.get(module.weight)) is not None}  # fmt: skip
    ulps = {layer: grids[module.weight].spacing(before[layer]) for layer, module in layers.items() if layer != "head"}
    with UpdateMonitor(model, optimizer).watching(1, rows):
        optimizer.step()
    found = {(row.layer, row.metric): row.value for row in rows}
    assert {layer for layer, _ in found} == set(layers)
    assert {metric for layer, metric in found if layer == "head"} == {"update_l2", "update_size"}  # the embedding's
    for layer, module in layers.items():
        old, new, g = before[layer].double(), module.weight.detach().double(), module.weight.grad.double()
        assert found[layer, "update_size"] == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-6)
        if layer == "head":
            continue
        amax = [w.abs().max().item() for w in (old, new)]
        if name == "adamw_sr_weights":
            amax = [held[layer], grids[module.weight].held.item()]
        q = [quantize(w.float(), "E4M3", scale=448 / a).double() for w, a in zip((old, new), amax, strict=True)]
        shift = 2.0 ** round(math.log2(amax[0] / amax[1]))  # 1/2 where a held amax has doubled
        codes = [q[0] * 448 / amax[0] * shift, q[1] * 448 / amax[1]]
        flips = (codes[0] - codes[1]).abs() > 1e-4 * codes[0].abs().clamp_min(2.0**-9)
        down = flips & (g * (q[1] - q[0]) < 0)
        assert found[layer, "update_success"] == pytest.approx((down.sum() / flips.sum()).item(), rel=1e-6)
        (group,) = [group for group in optimizer.param_groups if any(p is module.weight for p in group["params"])]
        kept = 1 - group["lr"] * group["weight_decay"]
        wanted = new if name == "adamw" else old * kept - group["lr"] * g.sign()
        stalled = ((wanted != old) & ~flips).sum() / (wanted != old).sum()
        assert 0 < found[layer, "stall_ratio"] == pytest.approx(stalled.item(), rel=1e-6)
        gap = ((wanted - old - (q[1] - q[0])).abs() / ulps[layer]).mean().item()
        assert found[layer, "representability_gap"] == pytest.approx(gap, rel=1e-3)


def test_a_cell_that_cannot_work_is_found_among_equals_that_can():
    good = [make_cell("E4M3", seed=seed) for seed in (0, 1, 2)]
    bad = cell_of("rung", "bf16").model_copy(update={"seed": 1})
    check_cells(good, VOCABULARY, "bf16")
    with pytest.raises(UserError, match="has no quantized weight for this arm to act on") as raised:
        check_cells([*good, bad], VOCABULARY, "bf16")
    assert str(raised.value).startswith("params.yaml: optimizers.adamw: ")  # the name of the cell's arm


def test_a_geometry_aware_arm_without_quantized_weights_is_allowed_for_the_baseline_alone():
    cell = cell_of("spacing_unmatched", "bf16")
    check_cells([cell], VOCABULARY, "bf16")
    with pytest.raises(UserError, match="no quantized weight .* or set grid.baseline, which is E4M3, to bf16$"):
        check_cells([cell], VOCABULARY, "E4M3")


def test_weights_on_the_quantization_grid_need_one_scale_of_their_own():
    cell = make_cell("E4M3", arm=ARMS["adamw_sr_weights"])
    for change in ({"granularity": "row"}, {"scaling": "delayed"}):
        spec = cell.rules[0].weight.model_copy(update=change)
        rule = cell.rules[0].model_copy(update={"weight": spec})
        with pytest.raises(UserError, match="granularity: tensor and scaling: dynamic"):
            check_cells([cell.model_copy(update={"rules": [rule]})], VOCABULARY, "bf16")
