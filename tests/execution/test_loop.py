"""Laws of the loop between an executor and DVC. Oracle: an executor, a clock and a DVC that are told what to do."""

from __future__ import annotations

import json
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from altgrad.common.files import write_json, write_text
from altgrad.config import UserError
from altgrad.execution import BEGAN, Outcome, Task, pending
from altgrad.execution.cells import TaskRun
from altgrad.execution.pending import EVERY, TIMES_AS_LONG, HandOver, hand_to_dvc
from altgrad.execution.progress import not_compiled, result_line, steps_done, why_it_failed
from tests.execution.conftest import TASKS, AtOnce, Scripted


def test_what_ended_well_is_handed_over_and_what_did_not_is_named(handed):
    executor = Scripted({}, {"b": 0}, lambda: TASKS[0].log.write_text("hm\nerror: no luck\n"), {"a": 1, "c": 0})
    failures = TaskRun(executor).run(TASKS)
    assert handed == [["b", "c"]]
    assert failures == {
        "train@a": "error: no luck (its output is in scratch/workers/train@a.log)",
        "train@c": "refused (its output is in scratch/workers/train@c.log)",
    }


def test_who_watches_sees_since_when_tasks_run_and_why_one_failed(handed):
    TASKS[2].log.parent.mkdir(parents=True)
    TASKS[2].failed.write_text("of an earlier run")
    seen = []
    executor = Scripted({}, lambda: seen.append((BEGAN.exists(), TASKS[2].failed.exists())), {"a": 1, "b": 0, "c": 0})
    TaskRun(executor).run(TASKS)
    assert seen == [(True, False)] and not BEGAN.exists()
    assert TASKS[0].failed.read_text() == "it said nothing" and not TASKS[1].failed.exists()


@pytest.mark.parametrize(
    ("train", "there", "missing"),
    [
        ({"steps": 200}, [], ["loops in C++", "the model"]),
        ({"steps": 20}, [], ["loops in C++"]),
        ({"steps": 20, "compile": "on"}, ["altgrad/kernels-1.so"], ["the model"]),
        ({"steps": 200, "compile": "off"}, ["altgrad/kernels-1.so"], []),
        ({"steps": 200}, ["altgrad/kernels-1.so", "made/0123456789abcdef"], []),
        ({"steps": 200}, ["altgrad/kernels-1.so", "made/0123456789abcdef.lock"], ["the model"]),
    ],
)
def test_what_is_compiled_first_is_said(train, there, missing, tmp_path, monkeypatch):
    monkeypatch.setenv("ALTGRAD_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_json(Path("data/grid/a.json"), {"train": train})
    for name in there:
        write_text(Path("cache/AVX2", name), "")
    assert not_compiled(["a"]) == missing


def test_what_was_trained_is_diagnosed_while_others_train(diagnosed):
    executor = Scripted({"a": 0}, {"a": 0}, {"b": 0, "c": 0}, {"c": 0}, {"b": 0})
    assert TaskRun(executor).run(TASKS) == {}
    assert diagnosed == [["train@a"], ["diagnose@a"], ["train@b", "train@c"], ["diagnose@c"], ["diagnose@b"]]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_executor_and_what_was_finished_is_handed_over(handed, signum, capsys):
    before = signal.getsignal(signum)
    executor = Scripted({}, {"b": 0}, lambda: os.kill(os.getpid(), signum), {"a": 0, "c": 0})
    with pytest.raises(SystemExit) as stopped:
        TaskRun(executor).run(TASKS)
    assert executor.signals == [signum] and stopped.value.code == 128 + signum
    assert handed == [["b"]]
    assert capsys.readouterr().err.endswith("the checkpoints are saved, run the same command to resume\n")
    assert signal.getsignal(signum) == before
    assert not any(task.failed.exists() for task in TASKS) and not BEGAN.exists()


def test_the_rows_of_a_cell_tell_the_step_but_not_those_from_before_this_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    BEGAN.parent.mkdir(parents=True)
    BEGAN.touch()
    assert steps_done(TASKS[0]) == 0
    rows = Path("scratch/a-0123456789abcdef/history.jsonl")
    rows.parent.mkdir()
    for text, step in (("", 0), ("[0, 5", 0), ("[0, 5]\n", 0), ("[0, 5]\n[7, 5]\n[9, ", 7)):
        rows.write_text(text)
        assert steps_done(TASKS[0]) == step
    os.utime(rows, (1e9, 1e9))
    assert steps_done(TASKS[0]) == 0


def test_a_log_tells_the_mistake(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, log = TASKS[0], TASKS[0].log
    log.parent.mkdir(parents=True)
    assert why_it_failed(Outcome(task, 1)) == "it said nothing"
    log.write_bytes(b"start\n  0%| 1/10 [00:00<\r 80%| 8/10\nerror: of luck\n\n")
    assert why_it_failed(Outcome(task, 1)) == "error: of luck"
    assert why_it_failed(Outcome(task, -9)) == "its process was ended by SIGKILL, for want of memory perhaps"


def finished(key: str, loss: float | None) -> None:
    """Write down that a cell has trained to ``loss``, or has diverged."""
    entry, arm, seed, scale, *model = key.split("-", 4)
    found = {"key": key, "format": entry, "optimizer": arm, "seed": int(seed), "lr_scale": float(scale)}
    found |= {"model_name": model[0]} if model else {}
    found |= {"val_loss": loss, "outcome": "diverged", "outcome_step": 7, "signature": "spike"}
    path = Path("data/runs") / key / "metrics.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))


def test_a_cell_is_told_with_its_loss_beside_that_of_the_baseline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/grid").mkdir(parents=True)
    index = {"params": {"grid": {"baseline": "bf16"}}, "cells": ["bf16-adamw-3-0.5", "E4M3-adamw-3-0.5"]}
    Path("data/grid/index.json").write_text(json.dumps(index | {"cells": index["cells"][1:]}))
    finished("E4M3-adamw-3-0.5", 4.25)
    finished("bf16-adamw-3-0.5", 4.5)
    assert result_line("E4M3-adamw-3-0.5") == "E4M3-adamw-3-0.5: validation loss 4.2500", "it is of an earlier grid"
    Path("data/grid/index.json").write_text(json.dumps(index))
    assert result_line("E4M3-adamw-3-0.5").endswith("loss 4.2500, -0.2500 against bf16-adamw-3-0.5")
    assert result_line("bf16-adamw-3-0.5") == "bf16-adamw-3-0.5: validation loss 4.5000"
    finished("E7M0-adamw-3-0.5", None)
    assert result_line("E7M0-adamw-3-0.5") == "E7M0-adamw-3-0.5: diverged at step 7 (spike)"


def test_a_cell_of_a_further_model_is_told_beside_the_baseline_of_this_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/grid").mkdir(parents=True)
    losses = {"bf16-adamw-3-0.5": 4.5, "E4M3-adamw-3-0.5": 4.25}
    losses |= {"bf16-adamw-3-0.5-gpt-50m": 3.0, "E4M3-adamw-3-0.5-gpt-50m": 3.5}
    Path("data/grid/index.json").write_text(json.dumps({"params": {"grid": {"baseline": "bf16"}}, "cells": [*losses]}))
    for key, loss in losses.items():
        finished(key, loss)
    assert result_line("E4M3-adamw-3-0.5").endswith("4.2500, -0.2500 against bf16-adamw-3-0.5")
    assert result_line("E4M3-adamw-3-0.5-gpt-50m").endswith("3.5000, +0.5000 against bf16-adamw-3-0.5-gpt-50m")


def task(key: str) -> Task:
    """Return a training task whose dependencies have the hash ``old``."""
    return Task("train", key, ("old",), 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the time, the seconds that a hand-over takes, and the keys of each one so far."""
    clock = SimpleNamespace(now=1000.0, takes=0.0, handed=[])

    def hand(tasks):
        clock.handed.append([task.key for task in tasks])
        clock.now += clock.takes
        return {}, []

    monkeypatch.setattr(pending, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(pending, "hand_to_dvc", hand)
    monkeypatch.setattr(pending, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_finished_tasks_wait_for_one_another_and_the_last_ones_for_nobody(clock):
    due = HandOver()
    due.add(task("a"))
    due.when_due(last=False)
    clock.now += EVERY
    due.add(task("b"))
    due.when_due(last=False)
    assert clock.handed == []
    clock.now += 1
    due.when_due(last=False)
    due.add(task("c"))
    due.when_due(last=True)
    due.when_due(last=True)
    assert clock.handed == [["a", "b"], ["c"]], "each once"
    clock.takes = 5.0  # a slow one makes the next one wait longer
    due.add(task("d"))
    due.when_due(last=True)
    due.add(task("e"))
    clock.now += TIMES_AS_LONG * 5
    due.when_due(last=False)
    assert clock.handed[2:] == [["d"]]
    clock.now += 1
    due.when_due(last=False)
    assert clock.handed[2:] == [["d"], ["e"]]


class Cell:
    """A stage that DVC knows."""

    def __init__(self, key: str, hashes: tuple[str, ...] = ("old",), problem: str = "") -> None:
        self.name, self.hashes, self.problem = f"train@{key}", hashes, problem

    def hash_dependencies(self) -> tuple[str, ...]:
        return self.hashes

    def save(self) -> None:
        if self.problem:
            raise UserError(self.problem)


def test_only_what_was_finished_from_what_is_there_now_is_handed_over(monkeypatch):
    cells = [Cell("good"), Cell("changed", ("new",)), Cell("lost", problem="no output"), Cell("running")]
    written = []

    @contextmanager
    def locked_project():
        yield SimpleNamespace(cells_of=lambda stage: cells if stage == "train" else [], write_lock_file=written.append)

    monkeypatch.setattr(pending.dvc_api, "locked_project", locked_project)
    monkeypatch.setattr(pending, "pending", lambda project, trained: sorted(trained))
    failures, following = hand_to_dvc([task("good"), task("changed"), task("lost")])
    assert written == [[cells[0]]]
    assert failures["train@lost"] == "no output" and "has changed meanwhile" in failures["train@changed"]
    assert len(failures) == 2 and following == ["good"], "what DVC did not take is not diagnosed"


def test_nobody_waits_for_a_hand_over_but_at_the_end(monkeypatch):
    may_end = Event()

    def hand(tasks):
        assert may_end.wait(10)
        return {"train@a": "refused"}, [task("b")]

    monkeypatch.setattr(pending, "hand_to_dvc", hand)
    monkeypatch.setattr(pending, "EVERY", -1)
    due = HandOver()
    due.add(task("a"))
    assert due.when_due(last=False) == [] and due.failures == {}
    may_end.set()
    assert due.when_due(last=True) == [task("b")] and due.failures == {"train@a": "refused"}
