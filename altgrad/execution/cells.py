"""The cells of a grid from the plan to DVC: tasks to an executor, what it finished to DVC, interrupts to what runs.

`dvc repro` runs one stage at a time under a lock of its own and writes all of dvc.lock anew after each. So the cells
that it would train or diagnose are done ahead of it, and the finished ones are handed to DVC many at a time. A cell is
diagnosed when DVC has what its training wrote, while others train. What DVC has cached is taken from there.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from altgrad.config import UserError
from altgrad.config.files import read_json, write_text
from altgrad.execution import dvc_api
from altgrad.execution.draft import Draft
from altgrad.execution.early_stop import LOOK_EVERY, EarlyStop
from altgrad.execution.executor import BEGAN, LOGS, Executor, Status, Task
from altgrad.execution.handover import HandOver
from altgrad.execution.plan import first_tasks, rest
from altgrad.execution.progress import Progress, why_it_failed

POLL_SECONDS = 0.1
# Exit statuses of a task that did: of training, which writes a checkpoint, and of what dies of the signal.
TOLD_TO_STOP = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)


def run_cells(
    executor: Executor, choose: Callable[[list[Task]], list[Task]] | None = None, limit: float = math.inf, *,
    early_stop: bool = False,
) -> list[str]:  # fmt: skip
    """Run what `dvc repro` would run of the cells of params.yaml; return which stages it would run after them.

    ``choose`` says which of the tasks are run at all, and after ``limit`` seconds those that still run are stopped,
    with a checkpoint. With ``early_stop``, cells that their rivals have beaten are stopped, and told of at the end.
    Raises :class:`UserError` naming every task that failed, each with its last line; those that did
    not fail are handed to DVC all the same.
    """
    tasks, after = first_tasks()
    if not tasks:
        return after
    judge = EarlyStop(read_json(Path("data/grid/index.json"))["cells"]) if early_stop else None
    chosen = choose(tasks) if choose else tasks
    failures = run_tasks(chosen, executor, limit, judge) if chosen else {}
    if limit < math.inf and not failures and not any(Path("data/diag").glob("*.json")):
        failures = {"budget": "its time was over before a cell was done; the checkpoints are kept"}
    if failures:
        raise UserError("; ".join(f"{name}: {problem}" for name, problem in failures.items()))
    return rest()


def run_the_rest(stages: Sequence[str]) -> None:
    """Run the stages that come after the cells; a single one by itself, since DVC would look at every cell again.

    Raises :class:`UserError` where one fails.
    """
    if stages:
        dvc_api.reproduce(list(stages), alone=len(stages) == 1)


def run_tasks(
    tasks: Sequence[Task], executor: Executor, limit: float = math.inf, judge: EarlyStop | None = None
) -> dict[str, str]:
    """Run tasks, and the diagnoses of what they train, and hand them to DVC; return what went wrong, by name.

    After ``limit`` seconds nothing more is trained, and cells that train write a checkpoint and stop. So do those that
    ``judge`` gives up, and what it gives up beforehand is not begun.
    An interrupt or SIGTERM reaches every task that is running, which writes a checkpoint and stops; then this process
    ends with status 128 + signal.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    failures: dict[str, str] = {}
    hand_over, passed_on, over = HandOver(), 0, False
    unfinished: dict[str, Task] = {}  # what was submitted and has not ended, by name
    ends, out_of_time, status = time.monotonic() + limit, False, Status([], [])
    stopped: dict[str, Task] = {}  # what was given up
    looked = -LOOK_EVERY
    if judge:
        stopped = {task.name: task for task in judge.given_up(tasks)}
        tasks = [task for task in tasks if task.name not in stopped]

    def start(more: Sequence[Task]) -> None:
        for task in more:
            task.log.unlink(missing_ok=True)
            task.failed.unlink(missing_ok=True)
            unfinished[task.name] = task
        executor.submit(more)

    with _caught_signals() as received, _began(), closing(Progress()) as progress, closing(Draft()) as draft:
        progress.add(tasks)
        start(tasks)
        while not over:
            for signum in received[passed_on:]:  # before the poll, which may start the next task
                executor.cancel(signum)
                passed_on += 1
            if not out_of_time and time.monotonic() > ends:
                out_of_time = True
                executor.cancel(signal.SIGTERM)
                running = {task.name for task in status.running}
                forgotten = [task for name, task in unfinished.items() if name not in running]
                unfinished = {name: task for name, task in unfinished.items() if name in running}
                start([task for task in forgotten if task.stage == "diagnose"])  # so that what is trained counts
            status = executor.poll()
            for outcome in status.ended:
                task = unfinished.pop(outcome.task.name)
                progress.ended(outcome)
                if outcome.status == 0:
                    hand_over.add(task)
                elif task.name in stopped and outcome.status in TOLD_TO_STOP:
                    progress.drop(task)
                elif outcome.status not in TOLD_TO_STOP or not (received or out_of_time):
                    failures[task.name] = why_it_failed(outcome)
                    write_text(task.failed, failures[task.name])
                elif task.stage == "diagnose" and not received:
                    start([task])
            if judge and time.monotonic() - looked > LOOK_EVERY and not (received or out_of_time):
                looked = time.monotonic()
                beaten = [task for task in judge.given_up(status.running) if task.name not in stopped]
                if beaten:
                    stopped |= {task.name: task for task in beaten}
                    executor.cancel(signal.SIGTERM, [task.name for task in beaten])
            idle = not status.running and (passed_on > 0 or not unfinished)
            following = hand_over.when_due(last=idle)
            if following and not received:
                progress.add(following)
                start(following)
            over = idle and (passed_on > 0 or not unfinished)
            progress.show(status.running, last=over)
            if not (over or received or out_of_time):
                draft.when_due(progress.seconds_left())
            if not status.ended:
                time.sleep(POLL_SECONDS)
    if received:
        print("interrupted; the checkpoints are saved, run the same command to resume", file=sys.stderr)
        sys.exit(128 + received[0])
    if out_of_time:
        print("the budget's time is over; the next run goes on with what is left", file=sys.stderr)
    if stopped:
        print(
            f"given up, since another learning rate had beaten them by a fifth of the steps: {len(stopped)} "
            f"({', '.join(sorted(task.key for task in stopped.values()))})", file=sys.stderr,
        )  # fmt: skip
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
