"""Laws of the pipeline under mistakes and kills: one sentence, non-zero, nothing trained, nothing lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pipeline.conftest import CELLS, Project, environment

RUN = Path("data/runs/E4M3-adamw-0-1")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("grid.formats", ["bf16", "E4M4x"], "grid.formats[1]: unknown format 'E4M4x'"),
        ("overrides", {"E9": {"train": {"clip": 1.0}}}, "overrides"),
        ("train.device", "cuda", "no CUDA device"),
        ("recipes.uniform", [{"layers": "block.*", "weight": "FORMAT"}], "matches no layer"),
        ("corpora.mine", {"source": "local", "path": "nowhere"}, "nowhere"),
        ("models.tiny.heads", 3, "not divisible"),
    ],
)
def test_a_mistake_stops_the_pipeline_before_training(project: Project, setting, value, words):
    before = (project.folder / "params.yaml").read_text()
    project.set(setting, value)
    done = project.run("dvc", "repro", check=False)
    (project.folder / "params.yaml").write_text(before)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr and "train@" not in done.stdout.replace("Stage 'train@", "")


def test_a_corpus_shorter_than_the_context_says_so(project: Project):
    before = (project.folder / "params.yaml").read_text()
    project.set("models.tiny.context", 65536)
    done = project.run("dvc", "repro", check=False)
    (project.folder / "params.yaml").write_text(before)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "context + 1" in done.stderr


def test_killed_while_training_it_resumes_and_ends_with_the_same_bits(tmp_path):
    """SIGKILL to DVC and its whole process group in the middle of a cell, then ``dvc repro`` again."""
    project = Project(tmp_path / "killed")
    project.set("train.steps", 60)
    project.set("train.checkpoint_every", 5)
    stage = f"train@{CELLS[1]}"
    project.run("dvc", "repro", stage)
    expected = {p.name: p.read_bytes() for p in (project.folder / RUN).iterdir() if p.name != "timing.json"}
    for place in ("data/runs", "scratch"):
        shutil.rmtree(project.folder / place)

    command = ["dvc", "repro", "--force", "--single-item", stage]
    running = subprocess.Popen(
        command, cwd=project.folder, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not list(project.folder.glob("scratch/E4M3*/step-*.json")):
        assert running.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert not (project.folder / RUN / "metrics.json").exists()

    done = project.run(*command)
    assert "resuming after step" in done.stdout + done.stderr
    assert {p.name: p.read_bytes() for p in (project.folder / RUN).iterdir() if p.name != "timing.json"} == expected


def test_without_git_the_pipeline_still_runs(tmp_path):
    project = Project(tmp_path / "archive", git=False)
    project.run("dvc", "config", "--local", "core.no_scm", "true")
    assert "report" in project.repro()
    assert "not a git checkout" in (project.folder / "reports/REPORT.md").read_text()
