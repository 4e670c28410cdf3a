"""What is measured while a run trains. Oracles: cases by hand, float64, planted faults, and the table of metrics."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.formats import get_format
from altgrad.metrics import METRICS
from altgrad.model import GPT, GPTConfig, TensorRecipe, linear_layers
from altgrad.model.from_cell import arm_of, build_model
from altgrad.model.quantized.quantizer import Quantizer
from altgrad.numerics import quantize
from altgrad.numerics.sums import UpdateSums
from altgrad.optim import build_optimizer, weight_grids
from altgrad.training import train_cell
from altgrad.training.monitor import (
    SEQUENCES,
    Measurement,
    TensorMonitor,
    UpdateMonitor,
    first_nonfinite,
    moved,
    tensor_statistics,
    update_statistics,
)
from altgrad.training.outcome import SATURATION, nonfinite_rows, outstanding_rows
from altgrad.training.trainer import Trainer
from tests.training.conftest import VOCABULARY, arm_cell, make_cell

# --- tensors


def test_tensor_statistics_by_hand():
    """E4M3, amax 448 so scale 1: 1e-4 underflows (smallest 2^-9), 17 rounds to 16, 300 to 288."""
    t = torch.tensor([448.0, 1e-4, 17.0, 300.0, 0.0])
    found = tensor_statistics(t, Quantizer(TensorRecipe(format=get_format("E4M3"))))
    noise, signal = 1e-8 + 1 + 144, 448.0**2 + 1e-8 + 17**2 + 300.0**2
    assert found["amax"] == 448 and found["scale"] == 1 and found["nonfinite"] == 0
    assert found["underflow_frac"] == pytest.approx(1 / 4)
    assert found["overflow_frac"] == 0
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise))


def test_nonfinite_elements_are_counted_and_left_out():
    found = tensor_statistics(torch.tensor([1.0, math.nan, -math.inf, -2.0]), None)
    assert found == {"amax": 2.0, "nonfinite": 2.0}


def test_a_remembered_scale_shows_overflow():
    quantizer = Quantizer(TensorRecipe(format=get_format("E4M3"), scaling="static"))
    quantizer.history.fill_(1.0)
    assert tensor_statistics(torch.tensor([0.5, 2.0, 3.0, 1.0]), quantizer)["overflow_frac"] == 0.5


def test_the_first_nonfinite_tensor_is_the_first_computed():
    def row(layer, role, value):
        return Measurement(1, layer, role, "nonfinite", value)

    assert first_nonfinite([row("a", "input", 0.0), row("a", "grad", 1.0), row("b", "grad", 1.0)]) == "b grad"
    assert first_nonfinite([row("a", "grad", 1.0), row("b", "input", 2.0)]) == "b input"
    tied = [row("a", "input", 1.0), row("a", "weight", 0.0), row("head", "weight", 1.0)]
    assert first_nonfinite(tied) == "head weight"
    assert first_nonfinite([row("a", "input", 0.0)]) is None


# --- attention


def test_it_is_of_the_attention_that_the_block_computes():
    """By plain softmax in float64, from the projection's own output."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, layers=2, width=16, heads=2, context=8))
    for p in model.parameters():
        p.data *= 20
    model.blocks[1].attn.qkv.weight.data /= 1000  # whose heads then attend to all tokens
    tokens = torch.randint(0, 50, (SEQUENCES + 2, 8))
    kept = {}
    for i, block in enumerate(model.blocks):
        block.attn.qkv.register_forward_hook(lambda _, __, output, i=i: kept.__setitem__(i, output.detach().double()))
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    rows = TensorMonitor(model, blocks).observe(1, lambda: model(tokens, tokens), {"outputs"})
    found = {(row.layer, row.metric): row.value for row in rows}
    for i, qkv in kept.items():
        q, k = (qkv[:SEQUENCES, :, 16 * part : 16 * part + 16].unflatten(-1, (2, 8)) for part in (0, 1))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(8)
        p = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf).softmax(-1)
        heads = -(p * p.clamp_min(1e-300).log()).sum(-1).mean(dim=(0, 2))
        assert found[f"blocks.{i}", "attention_entropy"] == pytest.approx(heads.mean().item(), rel=1e-4)
        assert found[f"blocks.{i}", "attention_low_heads"] == (heads < 1).sum()
    assert [found[f"blocks.{i}", "attention_low_heads"] for i in (0, 1)] == [2, 0]


# --- updates


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
    cell = arm_cell(name)
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


# --- rows of a divergence


def test_features_are_rows_of_a_weight_and_columns_of_anything_else():
    t = torch.zeros(4, 6)
    t[1, 2], t[3, 2], t[3, 5] = math.nan, math.inf, -math.inf
    assert nonfinite_rows(t, "weight") == "output rows 1 to 3 (2 of 4)"
    assert nonfinite_rows(t, "grad") == "output rows 2 to 5 (2 of 6)"
    assert nonfinite_rows(t.reshape(2, 2, 6)[:1], "input") == "input feature 2 (of 6)"
    assert nonfinite_rows(torch.zeros(2, 2), "grad") == ""
    one = torch.zeros(3, 3)
    one[1, 1] = math.nan
    assert nonfinite_rows(one, "weight") == nonfinite_rows(one, "grad") == "output row 1 (of 3)"


def test_rows_stand_out_by_their_norm_over_the_median_of_their_layer():
    even = torch.ones(10, 4)
    odd = even.clone()
    odd[2], odd[7], odd[4] = 20.0, 9.0, 7.0
    odd[8:] = 0.0
    assert outstanding_rows({"even": 1e6 * even, "none": torch.zeros(3, 3)}) is None
    assert outstanding_rows({"even": even, "odd": odd}) == "odd output rows 2 to 7 (2 of 10)"
    assert outstanding_rows({"odd": odd, "more": torch.cat([even, 30 * even[:1]])}) == "more output row 10 (of 11)"


def test_a_run_whose_loss_rises_says_which_weights_went_far(tokens, tmp_path, monkeypatch):
    """`test_injected.py` has runs that end in NaN."""
    update = Trainer.update

    def disturbed(self: Trainer, step: int) -> None:
        if step == 3:
            self.model.norm.weight.data *= 100  # the loss rises,
            self.model.blocks[0].mlp.up.weight.data[6] *= 100
        update(self, step)

    monkeypatch.setattr(Trainer, "update", disturbed)
    settings = {"compute": "float32", "clip": 1e9, "steps": 60, "divergence": {"spike": 1.5, "window": 3}}
    train_cell(make_cell(lr=1e-6, **settings), tokens, tmp_path / "out", tmp_path)
    metrics = read_json(tmp_path / "out/metrics.json")
    assert metrics["outcome"] == "diverged" and metrics["first_nonfinite"] is None and metrics["val_loss"] is None
    assert 1 <= metrics["outcome_step"] <= metrics["steps"] < 60
    assert metrics["first_rows"] == "blocks.0.mlp.up output row 6 (of 64)"


# --- the table of metrics


def in_recipe(cell: Cell, rules: dict[str, object]) -> Cell:
    return Cell.model_validate(cell.model_dump(mode="json") | {"rules": [rules]})


def test_what_monitors_record_is_what_the_table_says(tokens, tmp_path) -> None:
    block = {"format": "E4M3", "granularity": "block", "block": 8, "scale": "E8M0"}
    rules = {"layers": "*", "weight": block, "input": block, "grad": block}
    plain = make_cell().model_dump(mode="json")
    mixture = Cell.model_validate(plain | {"model": plain["model"] | {"experts": 2}})
    cells = {"out": make_cell(), "blocks": in_recipe(make_cell(), rules), "experts": mixture}
    for name, cell in cells.items():
        train_cell(cell, tokens, tmp_path / name, tmp_path / f"{name}-root")
    rows = pd.concat([pd.read_parquet(tmp_path / name / "monitors.parquet") for name in cells])
    names = rows["metric"].str.replace(r"_2\^-?\d+$", "", regex=True)  # rungs by binade
    recorded = set(zip(names, rows["role"], strict=True))
    assert recorded == {(metric.name, role) for metric in METRICS.values() for role in metric.live}
    assert 0 <= read_json(tmp_path / "out/metrics.json")["clipped_frac"] <= 1  # the one that training has of a run


def test_saturation_begins_where_overflow_is_flagged() -> None:
    """Training cannot read the table: a reworded definition would train every cell anew."""
    assert METRICS["overflow_frac"].limit.value == SATURATION
