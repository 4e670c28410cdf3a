"""Which cells are given up, and what becomes of them. Oracles: histories in which it is written down, means by hand."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from altgrad.execution import Outcome, Status, Task, cells
from altgrad.execution.cells import MARGIN, EarlyStop, TaskRun, early_loss, is_beaten
from tests.training.conftest import make_cell

RATES = (1, 2, 4)
KEYS = [f"E4M3-adamw-{seed}-{rate}" for seed in (7, 8) for rate in RATES]


def task_of(key: str) -> Task:
    return Task("train", key, (), 100)


ROWS = [(0, None), (10, 9.0), (11, 5.0), (15, 4.0), (20, 3.0), (21, 1.0), (100, 0.5)]


@pytest.mark.parametrize(
    ("rows", "loss"),
    [(ROWS, 4.0), (ROWS[:5], 4.0), ([], None), (ROWS[:2], None), (ROWS[:4], None),
     ([(15, None), (20, None)], math.inf), ([(5, 1.0), (50, 1.0)], None)],
)  # fmt: skip
def test_the_mean_loss_of_the_second_tenth_counts_once_it_is_over(rows, loss):
    """Without a finite loss there a run has lost; one that logged none is not judged."""
    assert early_loss(rows, 100) == loss


@pytest.mark.parametrize(
    ("own", "rivals", "beaten"),
    [(4.0, [4.0 - MARGIN - 0.01], True), (4.0, [4.0 - MARGIN + 0.01], False), (4.0, [9.0, 3.0, None], True),
     (4.0, [None], False), (4.0, [], False), (None, [1.0], False), (math.inf, [9.0], True), (4.0, [math.inf], False)],
)  # fmt: skip
def test_a_cell_is_beaten_by_the_best_of_those_that_went_as_far(own, rivals, beaten):
    assert is_beaten(own, rivals) == beaten


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a grid of two seeds and three rates, in which nothing has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cells, "run_names", lambda grid, tokens: {cell.key: f"{cell.key}-0" for cell in grid})
    Path("data/grid").mkdir(parents=True, exist_ok=True)
    Path("data/grid/index.json").write_text(json.dumps({"cells": KEYS}))
    for key in KEYS:
        plan(key)
    return tmp_path


def plan(key: str) -> None:
    _, _, seed, rate, *model = key.split("-")
    made = json.loads(make_cell(seed=int(seed), steps=100, eval_every=50).to_json())
    made |= {"key": key, "lr_scale": int(rate)} | ({"model_name": model[0]} if model else {})
    Path(f"data/grid/{key}.json").write_text(json.dumps(made))


def trains(key: str, loss: float | None, to: int = 20) -> None:
    """Let a cell have logged this loss up to a step, in its scratch folder."""
    path = Path(f"scratch/{key}-0/history.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[0, 0, None, None, 6.0, None, None], *([s, s, 1e-3, loss, None, 1.0, 0.0] for s in range(10, to + 1, 5))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "[25, 25")  # a line that is being written


def finished(key: str, loss: float) -> None:
    path = Path(f"data/runs/{key}/history.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{step},{loss}" for step in range(10, 101, 5)]
    path.write_text("\n".join(["step,train_loss", "0,", *rows]) + "\n")


def given_up() -> list[str]:
    return [task.key for task in EarlyStop(KEYS).given_up([task_of(key) for key in KEYS])]


def test_the_worse_rates_of_every_seed_but_the_first_are_given_up_once_a_rival_has_come_so_far(grid):
    for key, loss in zip(KEYS[:3], (3.0, 4.0, 3.1), strict=True):
        trains(key, loss)
    trains(KEYS[3], 4.0)
    assert given_up() == []
    trains(KEYS[4], 3.0, to=15)
    assert given_up() == []
    trains(KEYS[4], 3.0)
    assert given_up() == [KEYS[3]]


def test_rivals_that_have_finished_count_and_a_lost_run_is_beaten(grid):
    finished(KEYS[4], 3.0)
    trains(KEYS[3], None)
    assert given_up() == [KEYS[3]]
    assert EarlyStop(KEYS).given_up([Task("diagnose", KEYS[3], (), 1)]) == []


def test_a_rate_of_another_model_is_no_rival(grid):
    keys = [*KEYS, *(f"{key}-nano" for key in KEYS)]
    for key in keys[len(KEYS) :]:
        plan(key)
    trains(KEYS[3], 4.0)
    trains(f"{KEYS[4]}-nano", 1.0)
    assert EarlyStop(keys).given_up([task_of(key) for key in keys]) == []
    trains(f"{KEYS[3]}-nano", 2.0)
    assert EarlyStop(keys).given_up([task_of(key) for key in keys]) == [task_of(f"{KEYS[3]}-nano")]


def test_a_loss_that_is_final_is_read_once_and_others_again(grid):
    judge = EarlyStop(KEYS)
    trains(KEYS[3], 4.0)
    assert judge.given_up([task_of(KEYS[3])]) == []
    trains(KEYS[5], 3.0)
    assert judge.given_up([task_of(KEYS[3])]) == [task_of(KEYS[3])]
    trains(KEYS[5], 9.0)
    assert judge.given_up([task_of(KEYS[3])]) == [task_of(KEYS[3])]


class Told:
    """Runs everything at once; a task ends by the signal that it is told, the others well after it."""

    def __init__(self) -> None:
        self.submitted: list[Task] = []
        self.running: list[Task] = []
        self.told: list[tuple[int, list[str] | None]] = []

    def submit(self, tasks: Sequence[Task]) -> None:
        self.submitted += tasks
        self.running += tasks

    def cancel(self, signum: int, only: list[str] | None = None) -> None:
        self.told.append((signum, only))

    def poll(self) -> Status:
        if not self.told:
            return Status(list(self.running), [])
        ended, self.running = self.running, []
        only = self.told[-1][1]
        return Status([], [Outcome(task, 143 if only and task.name in only else 0) for task in ended])


def test_what_is_beaten_while_it_runs_is_stopped_and_the_others_are_handed_over(handed, grid, capsys):
    for key, loss in zip(KEYS[3:], (4.0, 3.1, 3.0), strict=True):
        trains(key, loss)
    executor = Told()
    judge = EarlyStop(KEYS)
    found, judge.given_up = judge.given_up, lambda tasks: found(tasks) if executor.submitted else []
    assert TaskRun(executor, judge=judge).run([task_of(key) for key in KEYS[3:]]) == {}
    assert executor.told == [(signal.SIGTERM, [task_of(KEYS[3]).name])]
    assert handed == [KEYS[4:]]
    assert f"had beaten them by a fifth of the steps: 1 ({KEYS[3]})" in capsys.readouterr().err


def test_what_was_beaten_before_is_not_begun_again(handed, grid, capsys):
    for key, loss in zip(KEYS[3:], (4.0, 3.1, 3.0), strict=True):
        trains(key, loss)
    executor = Told()
    executor.told.append((0, None))  # so that everything ends well
    assert TaskRun(executor, judge=EarlyStop(KEYS)).run([task_of(key) for key in KEYS[3:]]) == {}
    assert [task.key for task in executor.submitted] == KEYS[4:] and handed == [KEYS[4:]]
    assert "1 (E4M3-adamw-8-1)" in capsys.readouterr().err
