"""What the pipeline costs: a throw-away pipeline of the shape of dvc.yaml. Oracle: DVC itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from altgrad.benchmark.pipeline import make_project, measure
from altgrad.config import UserError
from altgrad.config.files import read_yaml

PROJECT = Path(__file__).parents[2]


def test_the_throw_away_pipeline_has_the_stages_of_the_real_one(tmp_path):
    make_project(PROJECT, tmp_path, 3)
    real, copy = (read_yaml(folder / "dvc.yaml")["stages"] for folder in (PROJECT, tmp_path))
    assert list(copy) == list(real)
    for name, stage in real.items():
        assert {key: stage.get(key) for key in ("deps", "outs", "params", "matrix")} == {
            key: copy[name].get(key) for key in ("deps", "outs", "params", "matrix")
        }
        assert "python" not in copy[name]["cmd"]
        assert "altgrad" not in (tmp_path / "stages" / f"{name}.py").read_text() or "matrix" not in stage
    made = [out if isinstance(out, str) else next(iter(out)) for stage in copy.values() for out in stage["outs"]]
    for dep in {dep for stage in copy.values() for dep in stage["deps"]}:
        produced = any(dep == out or out.startswith(dep + "/") or dep.startswith(out + "/") for out in made)
        assert produced != (tmp_path / dep).exists(), f"{dep} has to be copied or made by a stage, and not both"
    command = [sys.executable, "-m", "dvc", "stage", "list", "--name-only"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()
    assert (
        sum(name.startswith("train@") for name in listed) == sum(name.startswith("diagnose@") for name in listed) == 3
    )


@pytest.mark.slow
def test_overhead_of_three_cells_is_measured_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = measure(PROJECT, 3)
    assert found["cells"] == 3 and found["per_cell_s"] == pytest.approx(found["first_s"] / 3, abs=0.01)
    low, high = found["no_op_range_s"]
    assert 0.1 < low <= found["no_op_s"] <= high < found["first_s"]
    assert json.dumps(found) and list(tmp_path.iterdir()) == []


def test_a_pipeline_that_fails_says_so(tmp_path):
    (tmp_path / "params.yaml").write_text("grid: {}")
    (tmp_path / "dvc.yaml").write_text("stages: {train: {cmd: x, deps: [nowhere]}}")
    with pytest.raises(UserError, match="the throw-away pipeline failed at .*execution.*models: is missing"):
        measure(tmp_path, 1)
