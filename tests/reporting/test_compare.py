"""The comparison recovers what was put in. Oracle: each run's metrics.json and arithmetic by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from altgrad.reporting.compare import compare


def loss(project: Path, key: str) -> float:
    return json.loads((project / f"data/runs/{key}/metrics.json").read_text())["val_loss"]


def row(frame, **values):
    for name, value in values.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_difference_to_the_baseline_is_the_mean_over_shared_seeds(project: Path, comparison) -> None:
    differences = [loss(project, f"E4M3-adamw-{seed}-1") - loss(project, f"bf16-adamw-{seed}-1") for seed in (0, 1)]
    found = row(comparison.best, format="E4M3")
    assert found["difference"].mean == pytest.approx(sum(differences) / 2, rel=1e-12)
    assert found["difference"].n == 2
    assert row(comparison.best, format="bf16")["difference"] is None
    own, base = loss(project, "E5M2-adamw-0-1"), loss(project, "bf16-adamw-0-1")
    one_seed = row(comparison.best, format="E5M2")
    assert one_seed["difference"].mean == pytest.approx(own - base)
    assert one_seed["perplexity"] == pytest.approx(math.exp(own))


def test_a_diverged_or_missing_run_is_counted_and_never_averaged(project: Path, comparison) -> None:
    diverged, missing = row(comparison.best, format="E7M0"), row(comparison.best, format="E5M2")
    assert (diverged["completed"], diverged["diverged"], diverged["difference"].n) == (1, 1, 1)
    assert (missing["completed"], missing["missing"]) == (1, 1)
    assert diverged["val_loss"] == loss(project, "E7M0-adamw-0-1")


def test_the_best_learning_rate_has_most_completed_seeds_then_least_loss(made) -> None:
    study = made(["bf16", "E3M4"], lr_scales=(0.25, 1, 4), diverged={"E3M4-adamw-0-1": 40})
    best = compare(study).best
    assert row(best, format="bf16")["lr_scale"] == 1 and row(best, format="bf16")["bracket"] == "bracketed"
    found = row(best, format="E3M4")
    assert found["lr_scale"] in (0.25, 4) and found["bracket"] == "unbracketed"
    assert found["difference"].n == 2


def test_learning_rates_are_compared_on_the_seeds_that_they_share(made) -> None:
    """An easy seed that only the worse rate completed must not make it the best."""
    lost = {"bf16-adamw-0-1": 40, "bf16-adamw-2-0.25": 40}
    study = made(["bf16"], seeds=(0, 1, 2), lr_scales=(0.25, 1), diverged=lost)
    cells = study.cells
    cells.loc[:, "val_loss"] = cells["val_loss"].where(cells["seed"] != 0, 0.5)
    assert row(compare(study).best, format="bf16")["lr_scale"] == 1


def test_a_rate_that_lost_all_its_seeds_is_never_the_best(made) -> None:
    lost = {f"bf16-adamw-{seed}-1": 40 for seed in (0, 1)}
    assert row(compare(made(["bf16"], lr_scales=(0.25, 1), diverged=lost)).best, format="bf16")["lr_scale"] == 0.25
