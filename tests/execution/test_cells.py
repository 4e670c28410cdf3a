"""Laws of cells trained side by side: the bits of `dvc repro`, nothing twice, nothing lost."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time

import pytest

from altgrad.config import UserError
from altgrad.execution.__main__ import main
from altgrad.execution.pending import first_tasks
from reports.faults.campaign import UGLY, stop
from tests.execution.test_dvc_files import leave_dvc
from tests.pipeline.conftest import CELLS, Project, environment, results, stages_of

COMMAND = (sys.executable, "-m", "altgrad.execution", "--jobs", "2")


def test_killed_on_the_way_the_results_are_those_of_dvc_repro_which_finds_them_done(project, planned, tmp_path):
    parallel = Project.at(shutil.copytree(planned, tmp_path / "parallel", symlinks=True))
    parallel.set("tracking", ["tensorboard"])  # which changes no bit
    killed, was_there = stop(parallel, "writing dvc.lock", signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL and was_there
    done = parallel.run(*COMMAND)
    assert "diagnose 2/2" in done.stderr and not any(word in done.stderr for word in UGLY)
    assert results(parallel) == results(project)
    assert (parallel.folder / "reports/index.html").exists()
    assert len(list((parallel.folder / "scratch/tracking/tensorboard").iterdir())) == 2
    assert parallel.repro() == set()


@pytest.mark.slow
def test_what_the_cache_holds_is_not_trained_again(tmp_path):
    project = Project(tmp_path / "changing")
    found = []
    for steps in (6, 4, 6):
        project.set("train.steps", steps)
        project.run(*COMMAND)
        logs = {log: log.stat().st_mtime_ns for log in (project.folder / "scratch/workers").iterdir()}
        assert not project.repro() & stages_of(*CELLS)
        found.append((logs, results(project)))
    assert found[0][0] != found[1][0] == found[2][0], "nothing was to be trained the third time"
    assert found[2][1] == found[0][1] != found[1][1]


@pytest.mark.slow
def test_one_that_fails_is_named_and_the_others_are_kept(tmp_path):
    project = Project(tmp_path / "failing")
    script = project.folder / "stages/train.py"
    guard = f"import sys\nif {CELLS[0]!r} in sys.argv:\n    sys.exit('error: out of luck')\n"
    script.write_text(guard + script.read_text())
    done = project.run(*COMMAND, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: train@{CELLS[0]}: error: out of luck" in done.stderr
    assert f"train@{CELLS[1]}" not in project.run("dvc", "status", f"train@{CELLS[1]}").stdout


@pytest.mark.slow
def test_stopped_in_the_middle_it_goes_on_from_the_checkpoints(tmp_path):
    projects = [Project(tmp_path / name) for name in ("serial", "stopped")]
    for project in projects:
        project.set("train.steps", 400)
        project.set("train.compile", "off")
    projects[0].run("dvc", "repro", *stages_of(*CELLS))
    folder = projects[1].folder
    process = subprocess.Popen(COMMAND, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: list(folder.glob("scratch/*/step-*.safetensors")))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "run the same command to resume" in errors
    assert len(results(projects[1])) < len(results(projects[0]))
    projects[1].run(*COMMAND)
    assert results(projects[1]) == results(projects[0])


def test_a_project_that_dvc_is_at_work_in_is_said_in_one_sentence(project: Project, monkeypatch):
    leave_dvc(monkeypatch)
    monkeypatch.chdir(project.folder)
    hold = "from dvc.repo import Repo\nwith Repo() as repo, repo.lock:\n    print(flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], cwd=project.folder, env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        other.stdout.readline()
        with pytest.raises(UserError, match="^another DVC command holds this project's lock"):
            first_tasks()
        other.communicate("\n")


@pytest.mark.parametrize(("jobs", "words"), [("0", "--jobs: expected 1 or more, got 0"), ("two", "invalid int value")])
def test_wrong_numbers_of_jobs_are_refused(jobs, words, capsys):
    with pytest.raises((UserError, SystemExit)) as error:
        main(["--jobs", jobs])
    assert words in f"{error.value}{capsys.readouterr().err}"


def _wait_for(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
