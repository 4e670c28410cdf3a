"""Laws of a whole run: the same bits again, watched or not, and files that say what happened.

The cell has dropout, gradient accumulation, remembered scales and stochastic rounding. `test_resume.py` stops runs.
"""

from __future__ import annotations

import io
import json

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load, load_file

from altgrad.common.files import read_json
from altgrad.optim import ArmOptimizer
from altgrad.training import train_cell
from altgrad.training.evaluation import Evaluation
from altgrad.training.monitor import TensorMonitor, UpdateMonitor
from altgrad.training.run import make_trainer
from tests.training.conftest import STATEFUL, diagnosed, make_cell, trained, without_dropout

FOUND: dict[str, dict[str, bytes]] = {}


def test_the_same_cell_gives_the_same_bits_and_products_in_another_dtype_others(products, tokens, tmp_path):
    FOUND[products], again = (trained(make_cell(**STATEFUL), tokens, tmp_path / name) for name in "ab")
    assert again == FOUND[products]
    assert len({files["model.safetensors"] for files in FOUND.values()}) == len(FOUND)


WATCHED = [{"every": 1}, {"groups": ["tensors"], "intervals": {"tensors": 3}}, {"groups": ["outputs"]}, {"groups": []}]


@pytest.mark.parametrize("settings", WATCHED, ids=str)
def test_watching_a_run_does_not_change_it(tokens, undisturbed, tmp_path, settings):
    cell = make_cell(**STATEFUL)
    monitor = cell.monitor.but(**settings)
    found = trained(cell.model_copy(update={"monitor": monitor}), tokens, tmp_path)
    for name in set(undisturbed) - {"monitors.parquet"}:
        assert found[name] == undisturbed[name], name
    rows = pd.read_parquet(tmp_path / "out/monitors.parquet")
    group = {"output": "outputs", "weight_grad": "gradients", "update": "updates"}
    seen = {(step, group.get(role, "tensors")) for step, role in zip(rows["step"], rows["role"], strict=True)}
    assert seen == {(step, name) for step in range(1, 13) for name in monitor.due(step)}
    if settings == {"groups": ["outputs"]}:  # without a backward pass
        every = pd.read_parquet(io.BytesIO(undisturbed["monitors.parquet"]))
        pd.testing.assert_frame_equal(rows, every[every["role"] == "output"].reset_index(drop=True))


def test_what_is_watched_is_the_gradient_of_the_step(tokens, tmp_path):
    """Also of a step with several micro-batches, and of one whose loss is scaled."""
    largest = {}
    for name, train in {
        "whole": {"batch": 8, "grad_accumulation": 1}, "halves": {}, "scaled": {"loss_scale": 4.0},
    }.items():  # fmt: skip
        trained(make_cell(**train), tokens, tmp_path / name)
        rows = pd.read_parquet(tmp_path / name / "out/monitors.parquet")
        (largest[name],) = rows[
            (rows["step"] == 1) & (rows["layer"] == "head") & (rows["role"] == "grad") & (rows["metric"] == "amax")
        ]["value"]
    assert largest["halves"] == pytest.approx(largest["whole"], rel=0.01)
    assert largest["scaled"] == pytest.approx(4 * largest["halves"], rel=0.01)


def test_a_loss_scaled_by_a_power_of_two_trains_the_same_bits(tokens, undisturbed, tmp_path):
    """And by another factor nearly the same where gradients are not quantized, in whose products it is rounded."""
    power = trained(make_cell(**STATEFUL, loss_scale=2.0**12), tokens, tmp_path / "power")
    assert power["history.csv"] == undisturbed["history.csv"]  # gradient norms too
    mine, theirs = (load(files["model.safetensors"]) for files in (power, undisturbed))
    remembered = {name for name in theirs if ".quantizers.grad." in name and name.endswith("history")}
    assert remembered and all(
        torch.equal(mine[name], theirs[name] * (2.0**12 if name in remembered else 1)) for name in theirs
    )
    runs = [trained(make_cell("bf16", compute="float32", loss_scale=factor), tokens, tmp_path / f"{factor}")
            for factor in (1.0, 0.75)]  # fmt: skip
    losses = [json.loads(run["metrics.json"])["val_loss"] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert runs[0]["model.safetensors"] != runs[1]["model.safetensors"]


def test_what_is_not_watched_costs_nothing(tokens, tmp_path, monkeypatch):
    """Nothing that observes is called, and no moments are kept to compare with."""
    for part, name in ((TensorMonitor, "observe"), (TensorMonitor, "gradients"), (UpdateMonitor, "watching")):
        monkeypatch.setattr(part, name, lambda *_: pytest.fail("it was watched"))
    made = []
    step = ArmOptimizer.step
    monkeypatch.setattr(ArmOptimizer, "step", lambda self, *_, **options: (made.append(self), step(self, **options)))
    cell = make_cell(arm={"base": "sgd", "lr": 1e-2})
    train_cell(cell.model_copy(update={"monitor": cell.monitor.but(groups=[])}), tokens, tmp_path / "out", tmp_path)
    assert len(made) == 12 and not any("reference_avg" in state for state in made[0].state.values())


def test_the_files_say_what_happened(finished, undisturbed, tmp_path):
    for name, content in undisturbed.items():
        (tmp_path / name).write_bytes(content)
    metrics = json.loads(undisturbed["metrics.json"])
    assert metrics["outcome"] == "completed" and metrics["steps"] == 12 and metrics["first_rows"] is None
    assert metrics["tokens"] == 12 * 2 * 4 * 16
    assert metrics["quantized_parameters"] < metrics["parameters"]
    history = pd.read_csv(tmp_path / "history.csv")
    assert history["step"].tolist() == [0, 2, 4, 6, 8, 10, 12]
    assert history["val_loss"].notna().tolist() == [True, False, False, True, False, False, True]
    assert metrics["val_loss"] == history["val_loss"].iloc[-1]
    assert history["lr"].max() <= 1e-2
    monitors = pd.read_parquet(tmp_path / "monitors.parquet")
    assert sorted(monitors["step"].unique()) == [1, 5, 10]
    assert {"amax", "scale", "overflow_frac", "underflow_frac", "nonfinite", "sqnr_db", "kurtosis", "l2"} <= set(
        monitors["metric"]
    )
    probes = load_file(tmp_path / "probes.safetensors")
    assert {"weight/0/head", "weight/6/head", "weight/12/head", "grad_quantized/12/head", "grad_float/12/head"} <= set(
        probes
    )
    final = load_file(tmp_path / "model.safetensors")
    timing = json.loads((finished / "out/timing.json").read_text())
    assert timing["compile_s"] is None and min(timing[name] for name in ("observe_s", "evaluate_s")) > 0
    assert timing["observe_s"] + timing["evaluate_s"] < timing["train_s"] < timing["total_s"]
    assert np.array_equal(final["blocks.0.mlp.up.weight"], probes["weight/12/blocks.0.mlp.up"])
    assert diagnosed(make_cell(**STATEFUL), tmp_path, tmp_path / "diagnosed")[0]["status"] == "ok"


def test_every_probe_is_taken_whatever_is_logged_at_its_step(tokens, tmp_path):
    cell = make_cell(log_every=12, eval_every=12, checkpoint_every=12)
    cell = cell.model_copy(update={"monitor": cell.monitor.model_copy(update={"probes": 5})})
    trained(cell, tokens, tmp_path)
    probes = load_file(tmp_path / "out" / "probes.safetensors")
    assert {int(name.split("/")[1]) for name in probes if name.startswith("weight/")} == {0, 3, 6, 9, 12}


def test_a_validation_loss_that_is_not_finite_is_a_divergence(tokens, tmp_path, monkeypatch):
    losses = iter((1.0, None))
    monkeypatch.setattr(Evaluation, "loss", lambda _: next(losses))
    metrics = json.loads(trained(make_cell(eval_every=4), tokens, tmp_path)["metrics.json"])
    assert (metrics["outcome"], metrics["signature"], metrics["outcome_step"]) == ("diverged", "nonfinite", 4)


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
def test_an_evaluation_rounds_to_nearest(tokens, tmp_path, scaling):
    """It gives the loss of the same recipe without chance, and draws no numbers."""
    losses = []
    for rounding in ("nearest", "stochastic"):
        cell = without_dropout(make_cell(rounding=rounding, scaling=scaling))
        scratch = tmp_path / rounding
        scratch.mkdir()
        trainer = make_trainer(cell, tokens, scratch, torch.device("cpu"), "float32", compiled=False)
        losses += [trainer.evaluation.loss(), trainer.evaluation.loss()]
        drawn = [buffer[2].item() for name, buffer in trainer.model.named_buffers() if name.endswith(".stream")]
        assert len(drawn) == (15 if rounding == "stochastic" else 0) and not any(drawn)
    assert losses == losses[:1] * 4


@pytest.mark.slow
def test_a_compiled_cell_ends_where_an_eager_one_does(tokens, tmp_path):
    """Without dropout, for which the compiler has random numbers of its own."""
    losses = []
    for compile in ("off", "on"):
        cell = without_dropout(make_cell(compile=compile, steps=3, compute="float32", **STATEFUL))
        trained(cell, tokens, tmp_path / compile)
        losses.append(read_json(tmp_path / compile / "out" / "metrics.json")["val_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
