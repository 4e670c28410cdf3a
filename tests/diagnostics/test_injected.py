"""Faults are where they are said to be, and what stands in reports/first_anomaly is what the command counts.

Oracle: the bits of a healthy run of the same seed, and the committed table of runs.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from altgrad.common.files import read_json
from altgrad.metrics.first_anomaly import THRESHOLD, UPDATE_THRESHOLD
from reports.first_anomaly.injected import runs, score
from reports.first_anomaly.injected.__main__ import main
from reports.first_anomaly.injected.faults import (
    FORMAT,
    HEALTHY,
    KINDS,
    NAN,
    SCALE,
    Fault,
)

KEPT = Path(__file__).parents[2] / "reports/first_anomaly"
PLACE = ["layer", "role", "metric"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps, of which every second is watched."""
    monkeypatch.setattr(runs, "STEPS", 8)
    monkeypatch.setattr(runs, "EVERY", 2)


def trained_with(folder: Path, monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> list[pd.DataFrame]:
    """Return the measurements, (layer, role, metric) x step, of a healthy run and of one with each of ``faults``."""
    found = []
    for fault in (Fault(HEALTHY), *faults):
        monkeypatch.setattr(runs, "KINDS", {fault.kind: ""} if fault.kind != HEALTHY else {})
        monkeypatch.setattr(runs, "drawn", lambda *_, fault=fault: fault)
        monkeypatch.setattr(runs, "FIRST_INJECTED", 0)  # the seed of the healthy run
        (run,) = runs.trained(folder, int(fault.kind == HEALTHY), 1)
        rows = score.trace_of(run, 1).monitors
        found.append(rows.set_index([*PLACE, "step"])["value"].unstack("step"))
    return found


@pytest.mark.slow
def test_a_wrong_scale_is_that_of_one_tensor_from_its_step_on(short, tmp_path, monkeypatch) -> None:
    fault = Fault(SCALE, "blocks.0.mlp.up", "input", step=4, size=-3.0)
    healthy, faulty = trained_with(tmp_path, monkeypatch, fault)
    assert faulty[[1, 2]].equals(healthy[[1, 2]])
    ratio = (faulty[4] / healthy[4]).xs("scale", level="metric")
    assert ratio.pop((fault.layer, fault.role)) == 2.0**-3
    earlier = ratio.loc[["blocks.0.attn.qkv", "blocks.0.attn.out"]].drop("grad", level="role")
    weights = ratio.xs("weight", level="role")
    assert (earlier == 1).all() and (weights == 1).all() and len(earlier) and len(weights)


@pytest.mark.parametrize(("layer", "role", "rows"), [
    ("blocks.0.mlp.up", "input", "input feature 0 (of 32)"),
    ("blocks.0.attn.qkv", "grad", "output row 0 (of 96)"),
    ("head", "weight", "output row 0 (of 64)"),  # the embedding's too, which spoils all that follows
])  # fmt: skip
def test_a_nan_is_where_the_run_says(short, tmp_path, monkeypatch, layer, role, rows) -> None:
    monkeypatch.setattr(runs, "KINDS", {NAN: ""})
    monkeypatch.setattr(runs, "drawn", lambda *_: Fault(NAN, layer, role, step=4))
    (run,) = runs.trained(tmp_path, 0, 1)
    metrics = read_json(run.folder / "metrics.json")
    assert (metrics["outcome_step"], metrics["first_nonfinite"]) == (4, f"{layer} {role}")
    assert metrics["first_rows"] == rows


def test_counts_are_those_of_rows_made_by_hand() -> None:
    rows = pd.DataFrame(
        [(SCALE, True, True, True, 30.0, 10.0), (SCALE, True, True, False, 30.0, 5.0),
         (SCALE, False, False, False, None, None), (NAN, True, True, True, None, None),
         (HEALTHY, True, False, False, None, None), (HEALTHY, False, False, False, None, None)],
        columns=["kind", "named", "right_layer", "right_role", "loss_step", "lead"],
    )  # fmt: skip
    rows["right"] = rows["right_layer"] & rows["right_role"]
    table = score.table(rows).set_index("kind")
    scale, everything = table.loc[SCALE], table.loc[score.ALL]
    assert (scale["runs"], scale["named"], scale["right_layer"], scale["right"]) == (3, 2, 2, 1)
    assert (scale["precision"], scale["recall"]) == (1 / 2, 1 / 3)
    assert (scale["harmed"], scale["recall_harmed"], scale["lead"]) == (2, 1 / 2, 10)
    assert (everything["named"], everything["precision"], everything["recall"]) == (4, 2 / 4, 2 / 4)
    assert table.loc[HEALTHY, "named"] == 1


def test_the_kept_table_is_of_the_kept_runs_judged_at_todays_threshold() -> None:
    rows, table = (pd.read_csv(KEPT / f"{name}.csv") for name in ("runs", "table"))
    assert set(rows["threshold"]) == {THRESHOLD} and set(rows["update_threshold"]) == {UPDATE_THRESHOLD}
    assert set(rows["half"]) == {"judged"}
    assert set(rows["kind"]) == {HEALTHY, *KINDS}
    for (peers, every), own in rows.groupby(["peers", "every"]):
        again = score.table(own).reset_index(drop=True)
        kept = table[(table["peers"] == peers) & (table["every"] == every)].reset_index(drop=True)
        pd.testing.assert_frame_equal(again, kept[again.columns], check_dtype=False, rtol=1e-5)


@pytest.mark.slow
def test_injected_faults_are_named_and_healthy_runs_are_not(short, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(runs, "STEPS", 24)
    monkeypatch.setattr(score, "THRESHOLDS", (THRESHOLD,))
    main(["--healthy", "10", "--each", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"README.md", "runs.csv", "table.csv"}
    table = pd.read_csv(tmp_path / "out/table.csv").groupby("kind").first()
    assert table.loc[NAN, "right"] == table.loc[NAN, "runs"] == 1
    assert table.loc[HEALTHY, "runs"] == 5 and table.loc[HEALTHY, "named"] <= 1
    assert table.loc[[SCALE, FORMAT], "right"].sum() >= 1
