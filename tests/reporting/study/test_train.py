"""What the table lacks is trained, and nothing else; the project stays as it is. Oracle: the rows of made runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from altgrad.common.console import STOPS
from altgrad.config import UserError
from altgrad.reporting.study import train
from altgrad.reporting.study.questions import Question
from altgrad.reporting.study.runs import RunTable, parsed
from tests.pipeline.conftest import environment
from tests.reporting.study.made_study import rows, write_study

SHIPPED = Path(__file__).parents[3] / "params.yaml"
GRID = {"formats": ["E3M4"], "optimizers": ["adamw"], "seeds": [0, 1], "lr_scales": [1], "baseline": "E3M4"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project under git whose question has two runs, of which the table has none."""
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path, rows({}), a={"runs": {"one": {"grid": GRID, "after": {"prune": []}}}})
    shutil.copy(SHIPPED, tmp_path / "params.yaml")
    for name in ("altgrad/code.py", "stages/code.py", "dvc.yaml", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("scratch/\n")
    git("init", "--quiet")
    git("add", "--all")
    git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "start")
    return tmp_path


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


TRAINS = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    Path("began").touch()
    time.sleep(99)
finally:
    Path("saved").touch()
"""
STUDY = f"""
from pathlib import Path
from altgrad.common.errors import run_stage
from altgrad.common.console import STOPS
from altgrad.reporting.study import train

run_stage(lambda _: train._run(["-c", {TRAINS!r}], Path(), "one"), stops=STOPS)
"""


@pytest.mark.parametrize("signum", STOPS)
def test_who_is_stopped_alone_has_what_it_trains_save_checkpoints_first(signum: int, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STUDY], cwd=tmp_path, env=environment()) as command:
        while not (tmp_path / "began").exists():
            assert command.poll() is None
            time.sleep(0.05)
        command.send_signal(signum)
    assert command.returncode == 128 + signum and (tmp_path / "saved").exists()


def make_runs(arguments: list[str], folder: Path, name: str) -> None:
    """Stand in for the commands: two runs, of which the second diverged, and what pruning made of the first."""
    if "altgrad.execution" in arguments:
        for seed in (0, 1):
            run = folder / f"data/runs/E3M4-adamw-{seed}-1"
            run.mkdir(parents=True)
            ended = "diverged" if seed else "completed"
            (run / "metrics.json").write_text(json.dumps({
                "format": "E3M4", "optimizer": "adamw", "seed": seed, "lr_scale": 1, "outcome": ended,
                "val_loss": None if seed else 3.25, "steps": 200, "tokens": 204800, "parameters": 168256,
            }))  # fmt: skip
            timing = {"machine": "A processor, 2 cores", "compute": "bf16", "versions": {"torch": "2.13.0"}}
            (run / "timing.json").write_text(json.dumps(timing))
    else:
        table = [{"cell": "E3M4-adamw-0-1", "format": "E3M4", "share": share, "after": 3.3} for share in (0.0, 0.5)]
        pd.DataFrame(table).to_csv(folder / arguments[-1], index=False)


def write_question(study: Path, runs: dict[str, object]) -> None:
    (study / "a.yaml").write_text(json.dumps({"question": "Is it so?", "answer": "Yes.", "runs": runs}))


def trained(root: Path) -> RunTable:
    study = root / "reports/study"
    return train.train_missing(Question.read(study / "a.yaml"), RunTable.read(study / "results"), study, None)


def test_rows_name_the_commit_and_how_runs_ended(root, monkeypatch):
    before = (root / "params.yaml").read_bytes()
    trained_by = git("rev-parse", "HEAD")[:10]

    def another_commit_meanwhile(arguments: list[str], folder: Path, name: str) -> None:
        make_runs(arguments, folder, name)
        git("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--allow-empty", "--message", "later")

    monkeypatch.setattr(train, "_run", another_commit_meanwhile)
    found = trained(root)
    assert [tuple(row) for row in found.table[["seed", "val_loss", "status", "machine"]].fillna(0).to_numpy()] == [
        (0, 3.25, "ok", "A processor bf16"), (1, 0, "diverged", "A processor bf16"),
    ]  # fmt: skip
    assert set(found.table["commit"]) == {trained_by}
    assert list(found.after["measure"]) == ["pruned-0", "pruned-50"]
    written = RunTable.read(root / "reports/study/results")
    assert len(written.table) == 2 and len(written.after) == 2
    assert (root / "params.yaml").read_bytes() == before and not (root / "scratch/study/one").exists()
    monkeypatch.setattr(train, "_run", lambda *_: pytest.fail("trained again"))
    trained(root)


def test_only_seeds_that_lack_a_row_are_trained(root, monkeypatch):
    study = root / "reports/study"
    write_question(study, {"one": {"grid": GRID | {"formats": ["E3M4", "bf16"], "seeds": [0, 1, 2]}}})
    made = rows({("one", "E3M4", "adamw"): np.array([3.0, np.nan]), ("one", "bf16", "adamw"): np.array([3.0])})
    made.to_csv(study / "results/runs.csv", index=False)
    asked = []

    def note(arguments: list[str], folder: Path, name: str) -> None:
        asked.append(json.loads((folder / "params.yaml").read_text())["grid"]["seeds"])

    monkeypatch.setattr(train, "_run", note)
    assert len(trained(root).table) == 3 and asked == [[1, 2]]


def test_an_experiment_has_one_model(root):
    write_question(root / "reports/study", {"one": {"grid": GRID | {"models": ["nano"]}}})
    with pytest.raises(UserError, match=r"^one: grid\.models: a row of the study names no model; write an experiment"):
        trained(root)


def test_a_run_starts_from_the_weights_that_another_left_and_f1_is_a_measure(root, monkeypatch):
    study = root / "reports/study"
    grid = GRID | {"seeds": [0]}
    write_question(study, {
        "begun": {"grid": grid, "keep": True},
        "one": {"grid": grid, "start": "data/weights/begun", "task": "classify"},
    })  # fmt: skip

    def make_run(arguments: list[str], folder: Path, name: str) -> None:
        make_runs(arguments, folder, name)
        shutil.rmtree(folder / "data/runs/E3M4-adamw-1-1")
        run = folder / "data/runs/E3M4-adamw-0-1"
        (run / "model.safetensors").write_bytes(name.encode())
        if name == "one":
            assert (folder / "data/weights/begun/model.safetensors").read_bytes() == b"begun"
            found = json.loads((run / "metrics.json").read_text()) | {"test_micro_f1": 0.5, "test_macro_f1": None}
            (run / "metrics.json").write_text(json.dumps(found))

    monkeypatch.setattr(train, "_run", make_run)
    assert [tuple(row) for row in trained(root).after[["experiment", "measure", "value"]].to_numpy()] == [
        ("one", "micro_f1", 0.5)
    ]
    assert parsed(["adamw in E3M4 at micro_f1"], ["one"], RunTable.read(study / "results"))
    shutil.rmtree(root / "data/weights")
    trained(root)  # which lacks no run, and so needs no weights
    assert not (root / "data/weights").exists()


def test_a_command_that_was_interrupted_goes_on_in_its_checkout(root, monkeypatch):
    def interrupted(arguments: list[str], folder: Path, name: str) -> None:
        (folder / "checkpoint").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(root)
    assert (root / "scratch/study/one/checkpoint").exists()

    def goes_on(arguments: list[str], folder: Path, name: str) -> None:
        assert (folder / "checkpoint").exists()
        make_runs(arguments, folder, name)

    monkeypatch.setattr(train, "_run", goes_on)
    assert len(trained(root).table) == 2


@pytest.mark.parametrize("name", ["altgrad/code.py", "params.yaml"])
def test_code_and_settings_that_no_commit_has_are_refused(root, name):
    """Settings of params.yaml are part of what is trained, and the page names the commit alone."""
    with open(root / name, "a") as file:
        file.write("\n# changed\n")
    with pytest.raises(UserError, match="differs from the last commit"):
        trained(root)


def test_settings_that_are_refused_are_named_before_anything_trains(root):
    study = root / "reports/study"
    write_question(study, {"one": {"grid": GRID | {"formats": ["E3M4x"]}}})
    with pytest.raises(UserError, match=r"one \(with params.yaml\): grid.formats\[0\]: unknown format 'E3M4x'"):
        trained(root)


def test_experiments_share_what_is_compiled_and_import_their_own_checkouts_code(root):
    folder = Path("scratch/study/one")  # as it is where the command is given in the project's folder
    folder.mkdir(parents=True)
    shown = "import os; open('shown', 'w').write(os.environ['PYTHONPATH'] + ' ' + os.environ['ALTGRAD_COMPILE_CACHE'])"
    train._run(["-c", shown], folder, "one")
    assert (folder / "shown").read_text() == f"{folder.resolve()} {root / 'scratch/compiled'}"
