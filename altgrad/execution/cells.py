"""The loop of `make repro`: it gives tasks to an executor, hands finished ones to DVC, and passes interrupts on.

`dvc repro` runs one stage at a time under its lock and writes all of dvc.lock anew after each. This loop runs the cells
before `dvc repro` does, and hands many finished cells to DVC at a time. A cell is diagnosed once DVC has the outputs of
its training, while other cells train. Results in DVC's cache are taken from there.
"""

from __future__ import annotations

import csv
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from altgrad.common.console import handled
from altgrad.common.errors import UserError
from altgrad.common.files import read_json, write_text
from altgrad.config.cell import Cell, run_names
from altgrad.config.tasks import HISTORY
from altgrad.execution import BEGAN, HISTORY_FILE, LOGS, TOLD_TO_STOP, Executor, Outcome, Status, Task, costs, dvc_api
from altgrad.execution.pending import HandOver, first_tasks, rest
from altgrad.execution.progress import Progress, why_it_failed

POLL_SECONDS = 0.1
STEP, TRAIN_LOSS = HISTORY.index("step"), HISTORY.index("train_loss")  # positions in a row of history.jsonl
LOOK_EVERY = 2.0  # seconds between looks for cells to give up
FIRST, LAST = 0.1, 0.2  # losses between these shares of the steps are compared
MARGIN = 0.2  # nats per token by which a loss must be lower


def run_cells(
    executor: Executor, choose: Callable[[list[Task]], list[Task]] | None = None, limit: float = math.inf, *,
    early_stop: bool = False,
) -> list[str]:  # fmt: skip
    """Run the cells of params.yaml that `dvc repro` would run; return the names of the stages that come after them.

    ``choose`` takes the pending tasks and returns those to run; None runs all. After ``limit`` seconds, cells that
    train write a checkpoint and stop. With ``early_stop``, cells that another learning rate has beaten stop as well.
    Raises :class:`UserError` with the name and reason of each failed task; DVC gets the others all the same.
    """
    tasks, after = first_tasks()
    if not tasks:
        return after
    judge = EarlyStop(read_json(Path("data/grid/index.json"))["cells"]) if early_stop else None
    chosen = choose(tasks) if choose else tasks
    failures = TaskRun(executor, limit, judge).run(chosen) if chosen else {}
    if limit < math.inf and not failures and not any(Path("data/diag").glob("*.json")):
        failures = {"budget": "its time was over before a cell was done; the checkpoints are kept"}
    if failures:
        raise UserError("; ".join(f"{name}: {problem}" for name, problem in failures.items()))
    return rest()


def run_the_rest(stages: Sequence[str]) -> None:
    """Run ``stages``, which come after the cells. Raises :class:`UserError` if one fails.

    A single stage runs without the stages that it depends on, so that DVC does not check every cell again.
    """
    if stages:
        began = time.monotonic()
        dvc_api.reproduce(list(stages), alone=len(stages) == 1)
        if stages == ["report"]:
            costs.remember_report(time.monotonic() - began)


class TaskRun:
    """Runs tasks with an executor, hands their outputs to DVC, and runs the diagnoses of the trained cells.

    After ``limit`` seconds, cells that train write a checkpoint and stop, and no other cell trains. A cell that
    ``judge`` gives up stops in the same way, or is not begun.
    """

    def __init__(self, executor: Executor, limit: float = math.inf, judge: EarlyStop | None = None) -> None:
        self._executor, self._judge = executor, judge
        self._ends, self._out_of_time = time.monotonic() + limit, False
        self._received: list[int] = []  # signals
        self._passed_on = 0  # number of signals that the executor was sent
        self._unfinished: dict[str, Task] = {}  # tasks that were submitted and have not ended, by name
        self._given_up: dict[str, Task] = {}
        self._failures: dict[str, str] = {}
        self._status = Status([], [])
        self._began: dict[str, float] = {}  # when a task was first seen to run
        self._took: dict[Task, float] = {}
        self._at_once = 0
        self._looked = -LOOK_EVERY

    def run(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Run ``tasks`` and hand them to DVC; return the reason of each failure, by name of the task.

        After SIGINT or SIGTERM every running task writes a checkpoint and stops. Then this process ends with status
        128 + signal.
        """
        LOGS.mkdir(parents=True, exist_ok=True)
        if self._judge:
            self._given_up = {task.name: task for task in self._judge.given_up(tasks)}
        begun = [task for task in tasks if task.name not in self._given_up]
        caught = handled(lambda signum, frame: self._received.append(signum))  # so that they do not end this process
        BEGAN.touch()
        try:
            with caught, closing(Progress()) as progress:
                hand_over = HandOver()
                progress.add(begun)
                self._start(begun)
                while not self._turn(progress, hand_over):
                    if not self._status.ended:
                        time.sleep(POLL_SECONDS)
        finally:
            BEGAN.unlink(missing_ok=True)
        costs.remember(self._took, self._at_once)
        self._tell()
        failures = self._failures | hand_over.failures
        return {name: f"{problem} (its output is in {LOGS / name}.log)" for name, problem in failures.items()}

    def _start(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task.log.unlink(missing_ok=True)
            task.failed.unlink(missing_ok=True)
            self._unfinished[task.name] = task
        self._executor.submit(tasks)

    def _turn(self, progress: Progress, hand_over: HandOver) -> bool:
        """Pass signals on, collect ended tasks, start the tasks that follow; return whether all tasks are done."""
        for signum in self._received[self._passed_on :]:  # before the poll, which may start the next task
            self._executor.cancel(signum)
            self._passed_on += 1
        if not self._out_of_time and time.monotonic() > self._ends:
            self._end_training()
        self._status = self._executor.poll()
        self._at_once = max(self._at_once, len(self._status.running))
        for task in self._status.running:
            self._began.setdefault(task.name, time.monotonic())
        for outcome in self._status.ended:
            self._ended(outcome, progress, hand_over)
        self._look_for_beaten()
        idle = not self._status.running and (self._passed_on > 0 or not self._unfinished)
        following = hand_over.when_due(last=idle)
        if following and not self._received:
            progress.add(following)
            self._start(following)
        over = idle and (self._passed_on > 0 or not self._unfinished)
        progress.show(self._status.running, last=over)
        return over

    def _end_training(self) -> None:
        """Stop the running tasks and drop the waiting ones, except diagnoses, so that trained cells count."""
        self._out_of_time = True
        self._executor.cancel(signal.SIGTERM)
        running = {task.name for task in self._status.running}
        forgotten = [task for name, task in self._unfinished.items() if name not in running]
        self._unfinished = {name: task for name, task in self._unfinished.items() if name in running}
        self._start([task for task in forgotten if task.stage == "diagnose"])

    def _ended(self, outcome: Outcome, progress: Progress, hand_over: HandOver) -> None:
        task = self._unfinished.pop(outcome.task.name)
        progress.ended(outcome)
        if outcome.status == 0:
            hand_over.add(task)
            if task.name in self._began:
                self._took[task] = time.monotonic() - self._began[task.name]
        elif task.name in self._given_up and outcome.status in TOLD_TO_STOP:
            progress.drop(task)
        elif outcome.status not in TOLD_TO_STOP or not (self._received or self._out_of_time):
            self._failures[task.name] = why_it_failed(outcome)
            write_text(task.failed, self._failures[task.name])
        elif task.stage == "diagnose" and not self._received:
            self._start([task])

    def _look_for_beaten(self) -> None:
        """Every `LOOK_EVERY` seconds, stop the cells that another learning rate has clearly beaten."""
        due = time.monotonic() - self._looked > LOOK_EVERY and not (self._received or self._out_of_time)
        if self._judge is None or not due:
            return
        self._looked = time.monotonic()
        beaten = [task for task in self._judge.given_up(self._status.running) if task.name not in self._given_up]
        if beaten:
            self._given_up |= {task.name: task for task in beaten}
            self._executor.cancel(signal.SIGTERM, [task.name for task in beaten])

    def _tell(self) -> None:
        """Print why some tasks were not run to the end; exit with 128 + signal if a signal stopped them."""
        if self._received:
            print("interrupted; the checkpoints are saved, run the same command to resume", file=sys.stderr)
            sys.exit(128 + self._received[0])
        if self._out_of_time:
            print("the budget's time is over; the next run goes on with what is left", file=sys.stderr)
        if self._given_up:
            keys = ", ".join(sorted(task.key for task in self._given_up.values()))
            print(
                f"given up, since another learning rate had beaten them by a fifth of the steps: "
                f"{len(self._given_up)} ({keys})", file=sys.stderr,
            )  # fmt: skip


class EarlyStop:
    """The rule of `budget.early_stop`: give up a cell whose early training loss another learning rate clearly beats.

    Cells that differ in learning rate alone have the same initial weights and batches, so their training losses can be
    compared early. A cell is given up when another rate's mean loss over the second tenth of the steps is lower by more
    than `MARGIN`. Cells of the grid's first seed are never given up. They show whether a beaten cell would have won.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        cells = {key: Cell.read(Path(f"data/grid/{key}.json")) for key in keys}
        names = run_names(cells.values(), Path("data/tokens"))
        self._scratch = {key: Path("scratch", name) for key, name in names.items()}
        self._steps = {key: cell.train.steps for key, cell in cells.items()}
        groups: dict[tuple[object, ...], list[str]] = {}
        for key, cell in cells.items():
            groups.setdefault((cell.model_name, cell.format, cell.optimizer, cell.seed), []).append(key)
        self._rivals = {key: [other for other in group if other != key] for group in groups.values() for key in group}
        first = next(iter(cells.values())).seed if cells else None
        self._judged = {key for key, cell in cells.items() if cell.seed != first}
        self._losses: dict[str, float] = {}  # by key, once the second tenth of the steps is over

    def given_up(self, tasks: Collection[Task]) -> list[Task]:
        """Return the training tasks among ``tasks`` whose cells the rule gives up."""
        judged = [task for task in tasks if task.stage == "train" and task.key in self._judged]
        return [task for task in judged if is_beaten(self._loss(task.key), map(self._loss, self._rivals[task.key]))]

    def _loss(self, key: str) -> float | None:
        if key not in self._losses:
            loss = early_loss(_rows(Path(f"data/runs/{key}/history.csv"), self._scratch[key]), self._steps[key])
            if loss is None:
                return None
            self._losses[key] = loss
        return self._losses[key]


def early_loss(rows: Iterable[tuple[float, float | None]], steps: int) -> float | None:
    """Return the mean training loss over the second tenth of ``steps``; None before that tenth is over.

    ``rows``: step and training loss; the loss is None if it was not logged or is not finite. A run that has rows but no
    finite loss in that tenth returns infinity, and loses.
    """
    seen, losses, last = False, [], 0.0
    for step, loss in rows:
        last = max(last, step)
        if FIRST * steps < step <= LAST * steps:
            seen = True
            losses += [loss] if loss is not None else []
    if last < LAST * steps:
        return None
    return sum(losses) / len(losses) if losses else float("inf") if seen else None


def is_beaten(own: float | None, rivals: Iterable[float | None]) -> bool:
    """Return whether the lowest loss of ``rivals`` is over `MARGIN` below ``own``. None is a loss not known yet."""
    best = min((loss for loss in rivals if loss is not None), default=None)
    return own is not None and best is not None and own - best > MARGIN


def _rows(history: Path, scratch: Path) -> list[tuple[float, float | None]]:
    """Return (step, training loss) of each logged row, from ``history`` if it exists, else from folder ``scratch``."""
    if history.exists():
        with open(history, newline="", encoding="utf-8") as file:
            return [
                (float(row["step"]), float(loss) if (loss := row["train_loss"]) else None)
                for row in csv.DictReader(file)
            ]
    rows = []
    with suppress(OSError):  # it may end while it is read, or have nothing yet
        for line in (scratch / HISTORY_FILE).read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # the last line may be cut off
                row = json.loads(line)
                rows.append((row[STEP], row[TRAIN_LOSS]))
    return rows
