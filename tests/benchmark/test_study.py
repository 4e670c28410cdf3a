"""Where a study's time goes: the parts are all of it, and the grid is really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from altgrad.benchmark import command_line, study
from altgrad.benchmark.session import Session
from altgrad.model import GPTConfig

PROJECT = Path(__file__).parents[2]
TIMING = {"train_s": 5.0, "compile_s": 1.0, "observe_s": 0.5, "evaluate_s": 0.25, "total_s": 6.0}


def test_the_parts_of_a_cell_add_up_to_what_it_takes():
    timings = [TIMING, TIMING | {"compile_s": None, "train_s": 4.0, "total_s": 7.0}]
    parts = study._parts(timings, 8.0)
    expected = {"steps_s": 3.25, "loading_s": 0.5, "observe_s": 0.5, "evaluate_s": 0.25, "around_s": 2.0}
    assert parts == expected | {"outside_s": 1.5}
    assert sum(parts.values()) == 8.0


@pytest.mark.parametrize("name", ["pico", "micro"])
def test_a_model_is_measured_in_the_size_that_is_trained(name, tmp_path, monkeypatch):
    monkeypatch.chdir(PROJECT)
    session = Session(command_line.parse(["--models", name, "--output", str(tmp_path / "record.json")]), [])
    config = session._config(name)
    assert isinstance(config, GPTConfig)
    assert config.width == session.options.presets[name].width


@pytest.mark.slow  # trains two cells
def test_a_study_is_measured_on_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {"FORMATS": ["bf16"], "ARMS": ["adamw"], "SEEDS": [1], "STEPS": 2}.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "WARM_UP", ([0], 1))
    found = study.measure(PROJECT, "pico", 1, tmp_path / "cache")
    assert (found["cells"], found["steps"]) == (1, 2) and json.dumps(found)
    assert found["cells_per_hour"] == pytest.approx(3600 / found["took_s"], rel=0.02)
    assert sum(found[part] for part in study.PARTS) == pytest.approx(found["cell_s"], abs=0.05)
    assert found["steps_s"] > 0 and found["evaluate_s"] > 0 and found["outside_s"] > 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []
