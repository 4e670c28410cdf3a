"""What counts as a cell's evidence. Oracle: the files themselves, changed by hand."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest

from altgrad.common.files import read_json, write_json
from altgrad.config import UserError
from altgrad.reporting import tables
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, RUN_FILES, every_rule, prune
from tests.reporting.synthetic_project import SMALL, read, write_project

KEY = "E3M4-adamw-0-1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_project(tmp_path, ["bf16", "E3M4"], seeds=(0,), **SMALL)
    return tmp_path


def test_cells_come_in_grid_order_with_their_status(study) -> None:
    assert list(study.cells.index[:4]) == ["bf16-adamw-0-1", "bf16-adamw-1-1", "E4M3-adamw-0-1", "E4M3-adamw-1-1"]
    assert study.cells.loc["E7M0-adamw-1-1", "status"] == DIVERGED
    assert study.cells.loc["E5M2-adamw-1-1", ["status", "reason"]].tolist() == [MISSING, "not trained"]
    assert len(study.of_status(COMPLETED)) == 12
    cell = study.cells.loc["E7M0-adamw-1-1"]
    assert math.isnan(cell["val_loss"]) and cell["first_nonfinite"] == "" and cell["outcome_step"] == 40
    assert study.formats == ["bf16", "E4M3", "E5M2", "E3M4", "E1M6", "E0M7", "E7M0"]


def test_frames_hold_the_cells_that_ran_and_no_others(study) -> None:
    ran = study.cells[study.cells["status"] != MISSING]
    for frame in (study.history, study.monitors, study.diagnosis, study.summary):
        seen = set(zip(frame["format"], frame["seed"], strict=True))
        assert seen == set(zip(ran["format"], ran["seed"], strict=True))
    assert set(study.diagnosis["step"]) == {60.0}, "the last"


@pytest.mark.parametrize(("name", "reason"), [
    *((f"runs/{KEY}/{name}", f"incomplete run: no {name}") for name in RUN_FILES),
    *((f"diag/{KEY}.{end}", "trained but not diagnosed") for end in ("json", "parquet")),
])  # fmt: skip
def test_a_run_without_one_of_its_files_is_missing(root: Path, name: str, reason: str) -> None:
    (root / "data" / name).unlink()
    assert read(root).cells.loc[KEY, ["status", "reason"]].tolist() == [MISSING, reason]


def test_a_changed_setting_makes_the_old_run_missing(root: Path) -> None:
    path = root / f"data/grid/{KEY}.json"
    path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    study = read(root)
    assert study.cells.loc[KEY, "status"] == MISSING
    assert study.cells.loc[KEY, "reason"].startswith("stale")
    assert study.cells.loc["bf16-adamw-0-1", "status"] == COMPLETED


def test_without_a_grid_or_with_broken_json_the_user_is_told_what_to_do(root: Path, tmp_path: Path) -> None:
    (root / f"data/runs/{KEY}/metrics.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read(root)
    with pytest.raises(UserError, match="dvc repro"):
        read(tmp_path / "elsewhere")


def test_the_baseline_counts_only_when_it_is_in_the_grid(root: Path) -> None:
    assert read(root).baseline == "bf16"
    index = root / "data/grid/index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"cells": [KEY]}))
    assert read(root).baseline is None


def test_prune_removes_what_left_the_grid_and_nothing_else(root: Path) -> None:
    data = root / "data"
    old = "E4M3-adamw-0-0.5"  # a learning-rate scale with a point in it is no file suffix
    shutil.copytree(data / "runs" / KEY, data / "runs" / old)
    for suffix in ("json", "parquet"):
        shutil.copy(data / f"diag/{KEY}.{suffix}", data / f"diag/{old}.{suffix}")
    for folder in ("runs", "diag"):
        (data / folder / ".gitignore").write_text("/x\n")
    before = {path for path in data.rglob("*") if old not in str(path)}
    removed = prune(data)
    assert [path.name for path in removed] == [f"{old}.json", f"{old}.parquet", old]
    assert set(data.rglob("*")) == before
    for folder in ("runs", "diag"):
        shutil.rmtree(data / folder)
    assert prune(data) == []


def test_a_recipe_that_changes_is_described_with_what_it_changed_to_and_when(tmp_path: Path) -> None:
    """In the entry of two seeds, one of which met what it waited for; its rules are the other format's."""
    write_project(tmp_path, ["bf16", "E3M4", "E5M2"], seeds=(0, 1), **SMALL)
    other = read_json(tmp_path / "data/grid/E5M2-adamw-0-1.json")
    planned = [
        {"after": None, "when": {"spike": 1.5, "overflow": None, "nonfinite": True}, "recipe": "E5M2"},
        {"after": 0.9, "when": None, "recipe": "bf16"},
    ]
    made = [{"step": 54, "recipe": "bf16", "place": 2, "why": "after"}]
    for seed in (0, 1):
        grid, run, diagnosis = (tmp_path / "data" / place for place in (
            f"grid/E3M4-adamw-{seed}-1.json", f"runs/E3M4-adamw-{seed}-1/metrics.json", f"diag/E3M4-adamw-{seed}-1.json"
        ))  # fmt: skip
        rules = [other["rules"], []]
        schedule = [switch | {"rules": own} for switch, own in zip(planned, rules, strict=True)]
        write_json(grid, read_json(grid) | {"schedule": schedule})
        write_json(diagnosis, read_json(diagnosis) | {"cell_sha256": hashlib.sha256(grid.read_bytes()).hexdigest()})
        met = [{"step": 7, "recipe": "E5M2", "place": 1, "why": "spike"}] if seed else []
        write_json(run, read_json(run) | {"switches": met + made})
    study = read(tmp_path)
    assert len(study.of_status(COMPLETED)) == 6
    assert tables.changes_table(study).rows == [
        ["E3M4", "E5M2", "nonfinite or spike > 1.5", "1 of 2", "7"],
        ["E3M4", "bf16", "after 90 % of the steps", "2 of 2", "54"],
    ]
    layers = [row[0] for row in tables.recipe_table(study).rows]
    assert "E5M2: `*`" in layers and study.last_rules("E3M4") == []
    weights = {rule["weight"]["format"] for rule in every_rule(study.entry("E3M4"))}
    assert weights == {"E3M4", "E5M2"} and tables.changes_table(study) is not None


def test_each_recipe_of_a_grid_is_described_once(tmp_path: Path) -> None:
    write_project(tmp_path, ["bf16", "E3M4", "E4M3", "E5M2"], **SMALL)
    study = read(tmp_path)
    assert [row[0] for row in tables.recipe_table(study).rows] == ["`*`"]
    study.params["recipes"] = {"bf16": [], "E5M2": study.entry("E5M2")["rules"]}
    (rule,) = study.entry("E5M2")["rules"]
    rule |= {"hadamard": 16, "last": 0.15, "weight": rule["weight"] | {"rounding": "stochastic"}}
    own, other = tables.recipe_table(study).rows
    assert (own[0], other[0]) == ("E3M4: `*`", "E5M2: `*`, the last 15 %")
    assert "float32 scale per tensor, stochastic rounding" in other[1]
    assert "Hadamard transform of 16" in other[-1] and "Hadamard" not in own[-1]
