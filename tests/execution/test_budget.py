"""Laws of the estimate, of what a budget has room for and of the disk. Oracles: training's loop, counted; the model."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from altgrad.benchmark import runs
from altgrad.common.files import read_json, write_json
from altgrad.config import UserError
from altgrad.config.models import CellModel
from altgrad.config.schema import Budget, MonitorSettings
from altgrad.execution import Task, budget, cells, costs, pending
from altgrad.execution.__main__ import main
from altgrad.execution.budget import Estimate, choose, duration, said
from altgrad.execution.cells import TaskRun
from altgrad.execution.costs import (
    Kind,
    cell_bytes,
    disk_needed,
    kind_of,
    require_room,
    scratch_bytes,
    size,
)
from tests.benchmark.made import record
from tests.execution.conftest import TASKS, Scripted
from tests.pipeline.conftest import PROJECT, Project
from tests.reporting.synthetic_project import write_project


@given(
    steps=st.integers(1, 500), eval_every=st.integers(1, 200), every=st.integers(1, 200),
    parts=st.lists(st.floats(0, 10), min_size=5, max_size=5),
)  # fmt: skip
def test_a_cell_takes_what_its_steps_evaluations_and_looks_take(steps, eval_every, every, parts):
    step, evaluate, observe, setup, diagnose = parts
    took = setup + evaluate + diagnose  # the evaluation before the first step
    monitor = MonitorSettings(every=every)
    for i in range(1, steps + 1):
        took += step
        took += evaluate * (i % eval_every == 0 or i == steps)
        took += observe * bool(monitor.due(i))
    cell = {"train": {"steps": steps, "eval_every": eval_every}, "monitor": {"every": every, "groups": ["tensors"]}}
    # A step that is looked at as the first and as a multiple is one look.
    looks_twice = every == 1 and steps >= 1
    found = Kind(*parts, load=7.0).seconds(Task("train", "a", (), steps), cell)
    assert found == pytest.approx(took + observe * looks_twice, rel=1e-9, abs=1e-9)


def test_what_a_probe_measured_is_what_it_took():
    probe = {"steps": 10, "first_s": 9.0, "step_s": 0.1, "evaluate_s": 0.5, "observe_s": 0.2}
    probe |= {"setup_s": 1.0, "diagnose_s": 2.0}
    kind = Kind.of([probe, probe | {"first_s": 11.0, "step_s": 0.3}])
    assert kind.step == pytest.approx(0.2) and kind.diagnose == 2.0
    assert kind.load == pytest.approx(10.0 - (1.0 + 10 * 0.2 + 2 * 0.5 + 3 * 0.2))


@pytest.fixture
def grid(tmp_path, monkeypatch) -> list[Task]:
    """Return the tasks of a grid of two formats, two arms and three seeds."""
    monkeypatch.chdir(tmp_path)
    keys = write_project(tmp_path, ["bf16", "E4M3"], ["adamw", "spacing_unmatched"], (0, 1, 2), steps=60, blocks=1)
    return [Task("train", key, (), 60) for key in keys]


def an_estimate(tasks: list[Task], seconds: float = 10.0, jobs: int = 2) -> Estimate:
    settings = {task.key: read_json(Path(f"data/grid/{task.key}.json")) for task in tasks}
    return Estimate(dict.fromkeys((task.name for task in tasks), seconds), settings, load=4.0, jobs=jobs)


def test_whole_seeds_are_kept_in_the_order_of_the_grid(grid):
    found = an_estimate(grid)
    assert found.of(grid) == 4 + 12 * 10 / 2
    for limit, kept in ((64, 12), (63, 8), (44, 8), (43, 4), (24, 4), (23, 3), (9, 1), (8.9, 0)):
        fitting = found.fitting(grid, limit)
        assert len(fitting) == kept and found.of(fitting) <= limit
        if kept >= 4:
            assert {found.cells[task.key]["seed"] for task in fitting} == set(range(kept // 4))
        assert fitting == [task for task in grid if task in fitting]


def test_cells_that_differ_in_seed_rate_or_format_take_equally_long_and_others_need_not(grid):
    cells_ = {task.key: read_json(Path(f"data/grid/{task.key}.json")) for task in grid}
    own = cells_["E4M3-adamw-0-1"]
    assert kind_of(own) == kind_of(cells_["E4M3-adamw-2-1"]) != kind_of(cells_["bf16-adamw-0-1"])
    other = copy.deepcopy(own)
    other["rules"][0]["weight"]["format"] = "E5M2"
    other["arm"]["lr"] = 0.5
    assert kind_of(other) == kind_of(own)
    for path, value in ((("train", "batch"), 3), (("arm", "base"), "muon"), (("model", "width"), 8)):
        changed = copy.deepcopy(own)
        changed[path[0]][path[1]] = value
        assert kind_of(changed) != kind_of(own)
    changed = copy.deepcopy(own)
    changed["rules"][0]["weight"]["granularity"] = "row"
    assert kind_of(changed) != kind_of(own)


def test_the_user_hears_what_it_takes_and_costs_and_what_is_left_out(grid):
    found = an_estimate(grid)
    assert said(found, grid, Budget()) == "12 cells will take about 64 s, 2 at a time"
    assert said(found, grid, Budget(price=9)) == "12 cells will take about 64 s and cost 0.16, 2 at a time"
    text = said(found, grid, Budget(seconds=50))
    assert text.endswith("budget.seconds has room for 8 of them, about 44 s. Left out: 4, of seed 2")
    text = said(found, grid, Budget(price=9, cap=0.07))
    assert "budget.cap has room for 4 of them, about 24 s and cost 0.06. Left out: 8, of seeds 1, 2" in text
    assert [duration(s) for s in (12.3, 100, 9000)] == ["12 s", "1.7 min", "2.5 h"]
    found = replace(found, before=20, after=9, timed="by a few steps of 4 of 4 kinds of cells")
    assert found.of(grid) == 20 + 4 + 12 * 10 / 2 + 9
    assert said(found, grid, Budget()) == (
        "12 cells will take about 1.6 min, 2 at a time (20 s until they start, 64 s of training and diagnosis, 9 s of "
        "DVC and the report; by a few steps of 4 of 4 kinds of cells)"
    )


def test_what_such_cells_took_before_is_not_timed_again(grid, monkeypatch):
    """The first of each process, which load or compile, are not what others take; nor are those of other settings."""
    monkeypatch.setattr(budget, "probed", lambda keys, *_, **__: pytest.fail(f"{keys} were timed"))
    own = [task for task in grid if task.key.startswith("E4M3-adamw")]
    took = dict(zip(own, (40.0, 41.0, 5.0), strict=True)) | {task._replace(stage="diagnose"): 2.0 for task in own}
    costs.remember(took, 2)
    found = budget.estimate(own, 2)
    assert set(found.seconds.values()) == {5.0 + 2.0} and found.load == costs.COMPILES
    assert "earlier runs of 1 of 1 kind of cells" in found.timed
    for tasks, jobs in ((own, 1), (grid, 2)):
        with pytest.raises(pytest.fail.Exception, match="were timed"):
            budget.estimate(tasks, jobs)
    timing = Path(f"data/runs/{own[2].key}/timing.json")
    write_json(timing, read_json(timing) | {"resumed": 1})
    costs.TOOK.unlink()
    costs.remember(took, 2)
    assert costs.remembered({kind_of(read_json(Path(f"data/grid/{own[0].key}.json")))}, 2) == {}


@pytest.mark.parametrize(("step", "compiled"), [(0.1, False), (100.0, True)])
def test_kinds_without_time_are_taken_for_the_slowest_and_only_a_long_grid_is_compiled(
    grid, monkeypatch, step, compiled
):
    """Its cells have 60 steps, and are to be compiled. One that quantizes is timed first."""
    for task in grid:
        path = Path(f"data/grid/{task.key}.json")
        cell = read_json(path)
        write_json(path, cell | {"train": cell["train"] | {"compile": "on"}})
    asked = []

    def probed(keys, jobs, eager=False):
        asked.append((keys, eager))
        return {keys[0]: Kind(step, 0.0, 0.0, 1.0, 2.0, load=5.0)}

    monkeypatch.setattr(budget, "probed", probed)
    found = budget.estimate(grid, 2)
    assert asked == [(["E4M3-adamw-0-1", "bf16-adamw-0-1"], eager) for eager in (True, False)[: 1 + compiled]]
    assert found.load == 2 * (5.0 + (0 if compiled else budget.COMPILING / 2))
    assert found.timed == "by a few steps of 1 of 2 kinds of cells; the others as the slowest of these"
    assert set(found.seconds.values()) == {1.0 + 60 * step + 2.0}


def test_a_report_takes_what_the_last_one_took(grid):
    assert costs.report_seconds(100) == costs.REPORT + 100 * costs.OF_A_CELL
    costs.remember_report(7.0)  # of 12 cells
    assert costs.report_seconds(12) == 7.0 and costs.report_seconds(22) == 7.0 + 10 * costs.OF_A_CELL


def test_a_probe_begins_no_further_kind_when_its_time_is_over(monkeypatch, capsys):
    monkeypatch.setattr(runs, "parts_measured", lambda key, root, settings, eager: {"eager": eager})
    monkeypatch.setattr(runs, "LONGEST", -1.0)
    monkeypatch.chdir(PROJECT)
    for options in ([], ["--eager"]):
        runs.main([*options, "a", "b"])
        (line,) = capsys.readouterr().out.splitlines()
        assert json.loads(line) == {"key": "a", "eager": bool(options)}


def test_a_budget_without_room_for_a_cell_is_one_sentence(grid, monkeypatch, capsys):
    monkeypatch.setattr(budget, "estimate", lambda tasks, jobs: an_estimate(tasks))
    assert choose(grid, 2, Budget(seconds=44)) == grid[:2] + grid[3:5] + grid[6:8] + grid[9:11]
    with pytest.raises(UserError, match=r"room for no cell; raise budget\.seconds or make the cells smaller"):
        choose(grid, 2, Budget(seconds=3))
    assert "12 cells will take" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "limit"),
    [({}, math.inf), ({"seconds": 60}, 60), ({"price": 2, "cap": 1}, 1800), ({"price": 2, "cap": 1, "seconds": 9}, 9)],
)
def test_the_nearer_limit_counts(settings, limit):
    assert Budget(**settings).limit == limit


class Stopped(Scripted):
    """One that runs two tasks at a time. By a signal those that run then end, and those that wait are forgotten."""

    def __init__(self, *endings: dict[str, int]) -> None:
        super().__init__(*endings)
        self.waiting: list[Task] = []

    def submit(self, tasks):
        self.waiting += tasks

    def cancel(self, signum):
        super().cancel(signum)
        self.waiting.clear()
        self.endings = [{task.key: 143 if task.stage == "train" else -15 for task in self.running}]

    def poll(self):
        signals, self.signals = self.signals, []  # or it would end everything
        if not self.endings:
            self.endings = [{task.key: 0 for task in self.running}]
        status = super().poll()
        self.signals = signals
        while self.waiting and len(self.running) < 2:
            self.running.append(self.waiting.pop(0))
        return status._replace(running=list(self.running))


def test_when_the_time_is_over_what_trains_is_stopped_and_what_was_trained_is_diagnosed(diagnosed, capsys):
    # When the time is over a and b are trained, c and the diagnosis of a run, and that of b waits.
    tasks = [*TASKS, Task("train", "d", (), 10)]
    executor = Stopped({}, {"a": 0}, {"b": 0}, lambda: time.sleep(0.3), {})
    assert TaskRun(executor, limit=0.2).run(tasks) == {}
    assert executor.signals == [signal.SIGTERM]
    assert sorted(name for names in diagnosed for name in names) == ["diagnose@a", "diagnose@b", "train@a", "train@b"]
    assert not any(task.failed.exists() for task in TASKS)
    assert "the budget's time is over" in capsys.readouterr().err


def test_a_probe_that_fails_says_why(grid, monkeypatch):
    monkeypatch.setattr(budget, "PROBE", [sys.executable, "-c", "import sys; sys.exit('error: no more memory')"])
    with pytest.raises(UserError, match=r"no estimate could be made: no more memory \(all of it is in .*probe-0.log\)"):
        budget.estimate(grid, 2)


def test_an_interrupted_estimate_leaves_no_probe_behind(tmp_path):
    """The interrupt is the command's alone: nobody sends it to the probe, which would sleep on."""
    code = """
import os, signal, sys, threading, psutil
from altgrad.execution import budget
budget.PROBE = [sys.executable, "-c", "import time; time.sleep(100)"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background has not
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    budget.probed(["key"], 2)
except KeyboardInterrupt:
    sys.exit(len([c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]) + 10)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert ended.returncode == 10, ended.stderr.decode()


@pytest.mark.slow
def test_an_estimate_of_the_real_thing_trains_nothing_and_a_budget_leaves_out_whole_seeds(tmp_path):
    project = Project(tmp_path / "project")
    project.set("grid.seeds", [0, 1, 2])
    project.set("budget.price", 60.0)
    command = (sys.executable, "-m", "altgrad.execution", "--jobs", "2")
    as_it_was = project.run("git", "diff").stdout
    told = project.run(*command, "--estimate", "-S", "train.steps=600").stdout
    assert project.run("git", "diff").stdout == as_it_was and not (project.folder / "dvc.lock").exists()
    project.set("train.steps", 600)
    assert "6 cells will take about" in told and "and cost" in told and " of disk, of which " in told
    assert not list((project.folder / "data/runs").glob("*")) and not list(project.folder.glob("scratch/probe-*"))
    amount, unit = re.search(r"take about ([\d.]+) (s|min|h)\b", told).groups()
    # Half of it, since the second estimate is measured anew, on a machine that may do more or less besides.
    project.set("budget.seconds", 0.5 * float(amount) * {"s": 1, "min": 60, "h": 3600}[unit])
    told = project.run(*command, check=False).stdout
    left_out = set(re.search(r"Left out: \d+, of seeds? (.*)", told)[1].split(", "))
    runs = {path.name for path in (project.folder / "data/runs").glob("*")}
    assert left_out and not any(key.split("-")[2] in left_out for key in runs)
    project.set("budget.seconds", None)
    project.run(*command)
    assert len(list((project.folder / "data/diag").glob("*.json"))) == 6


@pytest.mark.parametrize("gpu", [None, "imaginary"])
def test_an_estimate_where_no_cell_has_to_run_says_so_and_what_a_named_gpu_has(gpu, tmp_path, monkeypatch, capsys):
    shutil.copy(PROJECT / "params.yaml", tmp_path)
    write_json(tmp_path / "reports/bench/gpu_imaginary.json", record())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pending, "first_tasks", lambda: ([], []))
    main(["--estimate", *(["--gpu", gpu] if gpu else [])])
    said = capsys.readouterr().out
    assert said.startswith("no cell has to run") and ("An Imaginary GPU" in said) == bool(gpu)


CELL = Path("data/grid/E4M3-adamw-0-1.json")


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**15, 0, count))


def test_a_grid_takes_its_cells_and_checkpoints_of_those_that_train_at_a_time(grid, monkeypatch):
    cell = read_json(CELL)
    kept, at_work = cell_bytes(cell, 4096), scratch_bytes(cell, 4096)
    assert disk_needed(grid, 2) == len(grid) * kept + 2 * at_work
    assert disk_needed(grid[:1], 2) == kept + at_work and disk_needed([], 2) == 0
    diagnoses = [Task("diagnose", task.key, (), 1) for task in grid]
    assert disk_needed([*grid, *diagnoses], 2) == disk_needed(grid, 2) and disk_needed(diagnoses, 2) == 0

    probes, larger = (cell | {"monitor": cell["monitor"] | {"probes": cell["monitor"]["probes"] + 1}}), dict(cell)
    weights = 4 * CellModel(**cell["model"]).matrix_elements(4096)
    assert cell_bytes(probes, 4096) - kept == scratch_bytes(probes, 4096) - at_work == weights
    larger["model"] = cell["model"] | {"width": 2 * cell["model"]["width"]}
    write_json(CELL, larger)
    assert disk_needed(grid, 1) == (len(grid) - 1) * kept + cell_bytes(larger, 4096) + scratch_bytes(larger, 4096)

    before = disk_needed(grid, 0)
    monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError(95, "not supported")))
    assert disk_needed(grid, 0) == 2 * before, "outputs and the cache stand beside one another"
    assert not list(Path("data").glob(".links-*"))


def test_what_does_not_fit_is_refused_in_one_sentence_and_what_just_fits_is_not(grid, monkeypatch):
    need = disk_needed(grid, 2)
    free(monkeypatch, need)
    require_room(grid, 2)
    free(monkeypatch, need - 2_000_000)
    with pytest.raises(UserError) as error:
        require_room(grid, 2)
    for words in (size(need), f"{size(need - 2_000_000)} are free", "2.0 MB too few", "`dvc gc -w`", "monitor.probes"):
        assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_trains_where_it_would_not_fit(grid, monkeypatch):
    chosen = []

    def run_cells(executor, choose, limit, *, early_stop):
        chosen.append(choose(grid))

    monkeypatch.setattr(cells, "run_cells", run_cells)
    monkeypatch.setattr(cells, "run_the_rest", lambda rest: None)
    shutil.copy(PROJECT / "params.yaml", ".")
    free(monkeypatch, 10**6)
    with pytest.raises(UserError, match=r"the cells that have to run need about .* of disk, of which 1\.0 MB are free"):
        main(["--jobs", "2"])
    assert chosen == []
    free(monkeypatch, 10**12)
    main(["--jobs", "2"])
    assert chosen == [grid]
