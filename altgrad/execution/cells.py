"""The cells of a grid from the plan to DVC: tasks to an executor, what it finished to DVC, interrupts to what runs.

`dvc repro` runs one stage at a time under a lock of its own and writes all of dvc.lock anew after each. So the cells
that it would train or diagnose are done ahead of it, and the finished ones are handed to DVC many at a time. A cell is
diagnosed when DVC has what its training wrote, while others train. What DVC has cached is taken from there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from altgrad.config import UserError
from altgrad.config.files import write_text
from altgrad.execution.draft import Draft
from altgrad.execution.executor import BEGAN, LOGS, Executor, Task
from altgrad.execution.handover import HandOver
from altgrad.execution.plan import first_tasks, rest
from altgrad.execution.progress import Progress, why_it_failed

POLL_SECONDS = 0.1


def run_cells(executor: Executor) -> list[str]:
    """Run what `dvc repro` would run of the cells of params.yaml; return which stages it would run after them.

    Raises :class:`UserError` naming every task that failed, each with its last line; those that did not fail are
    handed to DVC all the same.
    """
    tasks, after = first_tasks()
    if not tasks:
        return after
    failures = run_tasks(tasks, executor)
    if failures:
        raise UserError("; ".join(f"{name}: {problem}" for name, problem in failures.items()))
    return rest()


def run_the_rest(stages: Sequence[str]) -> None:
    """Run the stages that come after the cells, by DVC's own command; end the process where one fails.

    A single one is run by itself, since `dvc repro` looks at every cell again.
    """
    if stages:
        alone = ["--single-item", *stages] if len(stages) == 1 else []
        status = subprocess.run(["dvc", "repro", *alone], check=False).returncode
        if status:
            sys.exit(status)


def run_tasks(tasks: Sequence[Task], executor: Executor) -> dict[str, str]:
    """Run tasks, and the diagnoses of what they train, and hand them to DVC; return what went wrong, by name.

    An interrupt or SIGTERM reaches every task that is running, which writes a checkpoint and stops; then this process
    ends with status 128 + signal.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    hand_over, open_tasks, passed_on, over = HandOver(), 0, 0, False

    def start(more: Sequence[Task]) -> int:
        for task in more:
            task.log.unlink(missing_ok=True)
            task.failed.unlink(missing_ok=True)
        progress.add(more)
        executor.submit(more)
        return len(more)

    with _caught_signals() as received, _began(), closing(Progress()) as progress, closing(Draft()) as draft:
        open_tasks += start(tasks)
        while not over:
            for signum in received[passed_on:]:  # before the poll, which may start the next task
                executor.cancel(signum)
                passed_on += 1
            status = executor.poll()
            for outcome in status.ended:
                open_tasks -= 1
                progress.ended(outcome)
                if outcome.status == 0:
                    hand_over.add(outcome.task)
                else:
                    failures[outcome.task.name] = why_it_failed(outcome)
                    if not received:  # an interrupted cell has not failed
                        write_text(outcome.task.failed, failures[outcome.task.name])
            idle = not status.running and (passed_on > 0 or open_tasks == 0)
            following = hand_over.when_due(last=idle)
            if following and not received:
                open_tasks += start(following)
            over = idle and (passed_on > 0 or open_tasks == 0)
            progress.show(status.running, last=over)
            if not (over or received):
                draft.when_due(progress.seconds_left())
            if not status.ended:
                time.sleep(POLL_SECONDS)
    if received:
        print("interrupted; the checkpoints are saved, run the same command to resume", file=sys.stderr)
        sys.exit(128 + received[0])
    failures |= hand_over.failures
    return {name: f"{problem} (its output is in {LOGS / name}.log)" for name, problem in failures.items()}


@contextmanager
def _began() -> Iterator[None]:
    """Leave a mark of when tasks began to be run, for whoever watches."""
    BEGAN.touch()
    try:
        yield
    finally:
        BEGAN.unlink(missing_ok=True)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect interrupts instead of being stopped by them."""
    received: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(signum, lambda signum, frame: received.append(signum)) for signum in caught]
    try:
        yield received
    finally:
        for signum, handler in zip(caught, before, strict=True):
            signal.signal(signum, handler)
