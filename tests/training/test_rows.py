"""The rows that a divergence is named by. Oracles: places planted by hand, in tensors and in whole runs."""

from __future__ import annotations

import json
import math

import torch

from altgrad.training import train_cell
from altgrad.training.outcome import nonfinite_rows, outstanding_rows
from altgrad.training.trainer import Trainer
from tests.training.conftest import make_cell


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


def run_with(monkeypatch, tokens, root, disturb, **cell):
    update = Trainer.update

    def disturbed(self: Trainer, step: int) -> None:
        if step == 3:
            disturb(self.model)
        update(self, step)

    monkeypatch.setattr(Trainer, "update", disturbed)
    train_cell(make_cell(**cell), tokens, root / "out", root)
    return json.loads((root / "out/metrics.json").read_text())


def test_a_run_that_ends_in_nan_says_which_rows_had_it_first(tokens, tmp_path, monkeypatch):
    def spoil(model):
        model.blocks[0].mlp.up.weight.data[5:9] = math.nan

    metrics = run_with(monkeypatch, tokens, tmp_path, spoil)
    assert (metrics["outcome_step"], metrics["first_nonfinite"]) == (3, "blocks.0.mlp.up weight")
    assert metrics["first_rows"] == "output rows 5 to 8 (4 of 64)"


def test_a_run_whose_loss_rises_says_which_weights_went_far(tokens, tmp_path, monkeypatch):
    def spoil(model):
        model.norm.weight.data *= 100  # the loss rises,
        model.blocks[0].mlp.up.weight.data[6] *= 100

    settings = {"compute": "float32", "clip": 1e9, "steps": 60, "divergence": {"spike": 1.5, "window": 3}}
    metrics = run_with(monkeypatch, tokens, tmp_path, spoil, lr=1e-6, **settings)
    assert metrics["outcome"] == "diverged" and metrics["first_nonfinite"] is None
    assert metrics["first_rows"] == "blocks.0.mlp.up output row 6 (of 64)"


def test_a_run_that_completes_names_no_rows(tokens, tmp_path, monkeypatch):
    metrics = run_with(monkeypatch, tokens, tmp_path, lambda model: None)
    assert metrics["outcome"] == "completed" and metrics["first_rows"] is None
