"""A recorded run is what an unrecorded one is, and leaves the files that a run of the bench leaves.

Oracles: the same loop without a recorder; the readers of `make watch`, of trackers and of the report.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pandas as pd
import pytest
import torch
from torch import distributed as dist

from altgrad.common.files import read_json, write_json
from altgrad.config import UserError
from altgrad.config.schema import MonitorSettings
from altgrad.integrations import Recorder
from altgrad.metrics import METRICS
from altgrad.watch import DIAGNOSED, TRAINS, Project
from altgrad.watch.track import Told, Tracking
from tests.integrations.conftest import KEY, NAMED, arm_of, column, monitors, rows, small
from tests.reporting.synthetic_project import read
from tests.watch.conftest import started
from tests.watch.test_trackers import Written

TOP = Path(__file__).parents[2]


def test_a_run_has_the_same_losses_recorded_or_not_and_they_are_in_its_history(train, tmp_path):
    often = MonitorSettings(every=1)
    assert train(tmp_path, when=often) == train(None) == column(tmp_path, "train_loss")
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [*range(1, 9)]
    assert [row["tokens"] for row in found] == [64 * step for step in range(1, 9)]
    assert [row["lr"] for row in found] == [0.01] * 8
    assert [row["step"] for row in found if row["val_loss"] is not None] == [4, 8]


def test_the_monitors_see_every_role_of_every_layer_at_the_steps_that_are_due(train, tmp_path):
    train(tmp_path, when=MonitorSettings(every=4))
    found = monitors(tmp_path)
    assert set(found["metric"].str.replace(r"rungs_.*", "rungs", regex=True)) <= set(METRICS)
    of = {(step, layer): set(roles) for (step, layer), roles in found.groupby(["step", "layer"])["role"]}
    roles = {"input", "weight", "grad", "weight_grad", "update"}
    assert of == {(step, layer): roles for step in (1, 4, 8) for layer in ("1", "3")}
    assert "cosine_adamw" in set(found["metric"]) and "sqnr_db" in set(found["metric"])


def test_a_resumed_run_has_the_files_of_one_that_was_not_interrupted(train, tmp_path):
    whole, parts, saved = tmp_path / "whole", tmp_path / "parts", []
    often = MonitorSettings(every=3)
    train(whole, when=often)
    train(parts, when=often, to=6, save=saved.append)
    train(parts, when=often, checkpoint=saved[0])
    assert rows(parts) == rows(whole)
    pd.testing.assert_frame_equal(monitors(parts), monitors(whole))
    of = [read_json(root / "data/runs" / KEY / "metrics.json") for root in (whole, parts)]
    assert of[0] == of[1] and of[0]["outcome"] == "completed" and of[0]["val_loss"] is not None


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_records_without_monitors(rank, train, tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    losses = train(tmp_path)
    if rank:
        assert not (tmp_path / "data").exists() and len(losses) == 8
    else:
        assert column(tmp_path, "train_loss") == losses and monitors(tmp_path).empty


def test_a_run_that_blew_up_is_recorded_as_diverged(train, tmp_path):
    with pytest.warns(UserWarning, match="not finite"):
        train(tmp_path, blow_up=5)
    metrics = read_json(tmp_path / "data/runs" / KEY / "metrics.json")
    assert (metrics["outcome"], metrics["signature"], metrics["outcome_step"]) == ("diverged", "nonfinite", 5)
    assert metrics["val_loss"] is None


def test_watch_follows_a_run_while_it_trains_and_a_tracker_is_told_of_it(train, tmp_path):
    project, tracker = Project(tmp_path), Written()
    train(tmp_path, to=5)
    project.look()
    cell = project.cells[KEY]
    assert (cell.state, cell.step, cell.steps) == (TRAINS, 4, 8), "the row of a step is there when the next begins"
    train(tmp_path)
    project.look()
    assert project.cells[KEY] is cell, "the list of runs is the same"
    assert (cell.state, cell.step, cell.outcome) == (DIAGNOSED, 8, "completed")
    Tracking(tmp_path, [Told(tracker, tmp_path / "told.json")]).look()
    assert [(run, step) for run, step, _ in tracker.rows] == [(KEY, step) for step in range(1, 9)]
    assert tracker.ended[KEY][0]["val_loss"] == cell.metrics["val_loss"]


def command(folder: Path, *module: str) -> None:
    """Run a command in a folder of recorded runs, as its user does."""
    subprocess.run([sys.executable, "-m", *module], cwd=folder, env={**os.environ, "PYTHONPATH": str(TOP)}, check=True)


def test_the_page_and_the_trackers_need_no_params_yaml(train, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    train(tmp_path)
    with started(tmp_path, "--port", "0") as url, urlopen(url) as page:
        assert page.status == 200
    command(tmp_path, "altgrad.watch.track", "--tracker", "tensorboard")
    assert [path.name for path in (tmp_path / "scratch/tracking/tensorboard").iterdir()] == [KEY]


def test_the_report_compares_the_runs_of_a_folder(train, tmp_path):
    for seed in range(2):
        train(tmp_path, seed=seed)
        train(tmp_path, seed=seed, format="bf16")
    study = read(tmp_path)
    assert set(study.cells["status"]) == {"completed"} and study.baseline == "bf16" and len(study.cells) == 4
    assert study.cells["planned_steps"].tolist() == [8.0] * 4
    command(tmp_path, "stages.report")
    assert "E3M4" in (tmp_path / "reports/REPORT.md").read_text()


def test_what_cannot_be_recorded_is_refused_in_a_sentence(train, tmp_path):
    train(tmp_path)
    model = small()
    rest = {"steps": 8, "tokens_per_step": 64}
    with pytest.raises(TypeError, match="expected an optimizer of build_optimizer, got AdamW"):
        Recorder(tmp_path, model, torch.optim.AdamW(model.parameters()), **NAMED, **rest)
    for settings, words in (
        ({"format": "../E3M4"}, "letters, digits"), ({"seed": -1}, "greater than or equal"), ({"name": "a-b"}, "'-'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            Recorder(tmp_path, model, arm_of(model), **NAMED | settings, **rest)
    for settings, words in (({"corpus": "b"}, "another corpus"), ({"baseline": "E4M3"}, "baseline is bf16")):
        with pytest.raises(UserError, match=words):
            Recorder(tmp_path, model, arm_of(model), **NAMED, **rest, **settings)
    write_json(tmp_path / "theirs/data/grid/index.json", {"cells": [], "params": {}})
    with pytest.raises(UserError, match="the pipeline's own runs are here"):
        Recorder(tmp_path / "theirs", model, arm_of(model), **NAMED, **rest)
