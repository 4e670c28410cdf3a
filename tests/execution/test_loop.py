"""Laws of the loop between an executor and DVC. Oracle: an executor that does what it is told to, and no DVC."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from altgrad.execution import cells, handover
from altgrad.execution.cells import run_tasks
from altgrad.execution.executor import Outcome, Status, Task
from altgrad.execution.progress import last_line, steps_done

TASKS = [Task("train", key, (), 10) for key in "abc"]


class Scripted:
    """Starts all tasks at once; every poll answers with the next of ``endings``: what ended by then, and how.

    An ending may also be a function, which is called instead. Cancelled tasks end at the next poll.
    """

    def __init__(self, *endings: dict[str, int] | Callable[[], None]) -> None:
        self.running: list[Task] = []
        self.endings, self.signals = list(endings), []

    def submit(self, tasks: Sequence[Task]) -> None:
        self.running += tasks

    def poll(self) -> Status:
        ending = {task.key: 143 for task in self.running} if self.signals else self.endings.pop(0)
        if callable(ending):
            ending()
            ending = {}
        ended = [Outcome(task, ending[task.key]) for task in self.running if task.key in ending]
        self.running = [task for task in self.running if task.key not in ending]
        return Status(list(self.running), ended)

    def cancel(self, signum: int) -> None:
        self.signals.append(signum)


@pytest.fixture
def handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the keys that were handed to DVC, one list for each time."""
    handed: list[list[str]] = []

    def hand_to_dvc(tasks: Sequence[Task]) -> dict[str, str]:
        handed.append([task.key for task in tasks])
        return {task.name: "refused" for task in tasks if task.key == "c"}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(handover, "hand_to_dvc", hand_to_dvc)
    monkeypatch.setattr(cells, "POLL_SECONDS", 0.001)
    return handed


def test_what_ended_well_is_handed_over_and_what_did_not_is_named(handed):
    executor = Scripted({}, {"b": 0}, lambda: TASKS[0].log.write_text("hm\nerror: no luck\n"), {"a": 1, "c": 0})
    failures = run_tasks(TASKS, executor)
    assert handed == [["b", "c"]]
    assert failures == {
        "train@a": "error: no luck (its output is in scratch/workers/train@a.log)",
        "train@c": "refused (its output is in scratch/workers/train@c.log)",
    }


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_the_executor_and_what_was_finished_is_handed_over(handed, signum, capsys):
    before = signal.getsignal(signum)
    executor = Scripted({}, {"b": 0}, lambda: os.kill(os.getpid(), signum), {"a": 0, "c": 0})
    with pytest.raises(SystemExit) as stopped:
        run_tasks(TASKS, executor)
    assert executor.signals == [signum] and stopped.value.code == 128 + signum
    assert handed == [["b"]]
    assert capsys.readouterr().err.endswith("the checkpoints are saved, run the same command to resume\n")
    assert signal.getsignal(signum) == before


def test_a_log_of_an_earlier_run_is_no_progress(handed):
    TASKS[0].log.parent.mkdir(parents=True)
    TASKS[0].log.write_text("9/10 [")
    run_tasks(TASKS[:1], Scripted(lambda: None, {"a": 1}))
    assert not TASKS[0].log.exists()


def test_a_log_tells_the_step_and_the_mistake(tmp_path):
    log = tmp_path / "log"
    assert steps_done(log) == 0 and last_line(log) == "it said nothing"
    log.write_bytes(b"start\n  0%| 1/10 [00:00<\r 70%| 7/10 [00:01<\r 80%| 8/10\nerror: of luck\n\n")
    assert steps_done(log) == 7 and last_line(log) == "error: of luck"
