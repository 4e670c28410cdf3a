"""Laws of the pipeline under mistakes and kills: one sentence, non-zero, nothing trained, nothing lost.

And what `make repro` builds ahead is what training takes, where it looks for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import altgrad
from altgrad.config import UserError
from altgrad.numerics import loops
from altgrad.training import machine
from stages import grid, tokenize
from tests.pipeline.conftest import CELLS, Project, environment, stages_of

RUN = Path("data/runs/E4M3-adamw-0-1")


def test_a_mistake_stops_the_pipeline_before_training(project: Project):
    before = (project.folder / "params.yaml").read_text()
    project.set("grid.formats", ["bf16", "E4M4x"])
    done = project.run("dvc", "repro", check=False)
    (project.folder / "params.yaml").write_text(before)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "grid.formats[1]: unknown format 'E4M4x'" in errors[0], done.stderr
    assert "Traceback" not in done.stderr and "train@" not in done.stdout.replace("Stage 'train@", "")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("train.device", "cuda", "no CUDA device"),
        ("corpora.mine", {"source": "local", "path": "nowhere"}, "nowhere"),
        ("models.tiny.context", 65536, "context + 1"),  # longer than the corpus
    ],
)
def test_every_mistake_is_refused_before_training(project: Project, monkeypatch, setting, value, words):
    """By the stages that come before it."""
    monkeypatch.chdir(project.folder)
    before = Path("params.yaml").read_text()
    project.set(setting, value)
    with pytest.raises(UserError) as error:
        tokenize.main([])
        grid.main([])
    Path("params.yaml").write_text(before)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.long
def test_killed_while_training_it_resumes_and_ends_with_the_same_bits(planned: Path, tmp_path):
    """SIGKILL to DVC and its whole process group in the middle of a cell, then ``dvc repro`` again."""
    project = Project.at(shutil.copytree(planned, tmp_path / "killed", symlinks=True))
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


@pytest.mark.long
def test_without_git_the_pipeline_still_runs(planned: Path, tmp_path):
    folder = shutil.copytree(planned, tmp_path / "archive", symlinks=True, ignore=shutil.ignore_patterns(".git"))
    project = Project.at(folder)
    project.run("dvc", "config", "--local", "core.no_scm", "true")
    assert project.repro() == {"report"} | stages_of(*CELLS)
    assert "not a git checkout" in (project.folder / "reports/REPORT.md").read_text()


# A compiler that makes a file of the name it is asked for, and nothing that could be loaded.
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def test_every_source_of_the_project_is_built_in_the_folder_of_its_graphs(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    variables = {"CXX": str(compiler), "ALTGRAD_COMPILE_CACHE": str(cache)}
    command = [sys.executable, "-m", "stages.loops"]
    subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    machine.use_compile_cache(cache)
    made = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "altgrad").glob("*.so")
    sources = {source.stem for source in Path(altgrad.__file__).parent.rglob("*.cpp")}
    together = {source.stem for source in loops.SOURCES[1:]}  # in the library that is named after the first
    assert {file.stem.rpartition("-")[0] for file in made} == sources - together != set()
