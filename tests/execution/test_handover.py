"""When finished tasks are handed to DVC, and what is refused. Oracle: a clock and a DVC that are told what to say."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest

from altgrad.config import UserError
from altgrad.execution import pending
from altgrad.execution.executor import Task
from altgrad.execution.pending import EVERY, TIMES_AS_LONG, HandOver, hand_to_dvc
from tests.execution.conftest import AtOnce


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


def test_a_slow_hand_over_makes_the_next_one_wait_longer(clock):
    due, clock.takes = HandOver(), 5.0
    due.add(task("a"))
    due.when_due(last=True)
    due.add(task("b"))
    clock.now += TIMES_AS_LONG * 5
    due.when_due(last=False)
    assert clock.handed == [["a"]]
    clock.now += 1
    due.when_due(last=False)
    assert clock.handed == [["a"], ["b"]]


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
