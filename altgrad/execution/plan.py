"""Which stages have to run, those that `dvc repro` would run, and what finished ones wrote, handed to DVC.

Every hand-over reads and writes the whole of dvc.lock, so that it takes longer the more cells there are: many tasks are
handed over at a time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.execution import dvc_api
from altgrad.execution.executor import Task

BEFORE_CELLS = ("tokenize", "grid", "code")
# Seconds between two, at least, and as a multiple of what the last one took. Cells train on the same cores: at five
# times as long, a grid of 240 of them took a fifth of one core from two.
EVERY, TIMES_AS_LONG = 20, 15


def first_tasks() -> tuple[list[Task], list[str]]:
    """Return what `dvc repro` would run first of the cells, and which stages that are no cell's it would run.

    Those that come before the cells are run now, as far as they have changed.
    """
    with dvc_api.locked_project() as project:
        project.forget_others()
        for found in project.others():
            if not found.is_there():  # DVC would take it from the cache as it is
                found.drop_damaged()
        rest = _changed(project)
        if not set(BEFORE_CELLS) & set(rest):
            return pending(project), rest
    if "tokenize" in rest:
        _build_loops()
    dvc_api.reproduce(list(BEFORE_CELLS))
    with dvc_api.locked_project() as project:
        return pending(project), _changed(project)


def _build_loops() -> None:
    """Start building the loops in C++ that training takes, on a core that tokenizing leaves idle."""
    quiet = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-m", "stages.loops"], stdin=quiet, stdout=quiet, stderr=quiet)


def rest() -> list[str]:
    """Return which stages that are no cell's `dvc repro` would run."""
    with dvc_api.locked_project() as project:
        return _changed(project)


def _changed(project: dvc_api.Project) -> list[str]:
    return [found.name for found in project.others() if found.has_changed()]


def pending(project: dvc_api.Project, trained: Collection[str] | None = None) -> list[Task]:
    """Return what `dvc repro` would run next of the cells; what it would take from the run cache is taken from it now.

    Cells to train, and to diagnose those that are trained; ``trained`` names cells of which only the diagnoses are
    asked for. The outputs of what has to run are removed, as DVC does before it runs a stage.
    """
    tasks: list[Task] = []
    restored = []
    for stage in ("train", "diagnose"):
        before = {task.key for task in tasks}
        for found in project.cells_of(stage):
            if found.key in before or (trained is not None and (stage == "train" or found.key not in trained)):
                continue
            if not found.has_changed():
                continue
            found.remove_outputs()  # what a resumed cell needs is in its scratch directory
            if found.restore():
                restored.append(found)
            else:
                # Not sooner: a new hash of what it needs would make its old outputs look new.
                tasks.append(Task(stage, found.key, found.hash_dependencies(), _size(stage, found.key)))
    project.write_lock_file(restored)
    return tasks


def _size(stage: str, key: str) -> int:
    return read_json(Path(f"data/grid/{key}.json"))["train"]["steps"] if stage == "train" else 1


class HandOver:
    """Finished tasks on their way to DVC; ``failures`` says what DVC did not take, and why, by name.

    A hand-over goes on in a thread of its own, since a process that has ended its task waits for the next one.
    """

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._waiting: list[Task] = []
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[tuple[dict[str, str], list[Task]]] | None = None
        self._ended, self._took = time.monotonic(), 0.0  # the last one

    def add(self, task: Task) -> None:
        self._waiting.append(task)

    def when_due(self, *, last: bool) -> list[Task]:
        """Begin a hand-over if it is time to; return what can be run by one that has ended.

        ``last``: nothing else runs, so that all that waits is handed over now.
        """
        following = self._collected(wait=last)
        late = time.monotonic() - self._ended > max(EVERY, TIMES_AS_LONG * self._took)
        if self._waiting and self._under_way is None and (last or late):
            self._under_way = self._thread.submit(self._hand, self._waiting)
            self._waiting = []
        return following + self._collected(wait=last)

    def _hand(self, tasks: Sequence[Task]) -> tuple[dict[str, str], list[Task]]:
        began = time.monotonic()
        found = hand_to_dvc(tasks)
        self._ended = time.monotonic()
        self._took = self._ended - began
        return found

    def _collected(self, *, wait: bool) -> list[Task]:
        if self._under_way is None or not (wait or self._under_way.done()):
            return []
        failures, following = self._under_way.result()
        self._under_way = None
        self.failures |= failures
        return following


def hand_to_dvc(tasks: Sequence[Task]) -> tuple[dict[str, str], list[Task]]:
    """Put what finished tasks wrote into DVC's cache and lock file.

    Returns what went wrong, by name, and the diagnoses of what was trained, as far as they have to be run.
    """
    planned, failures, saved = {task.name: task.deps for task in tasks}, {}, []
    with dvc_api.locked_project() as project:
        for found in (cell for stage in ("train", "diagnose") for cell in project.cells_of(stage)):
            if found.name not in planned:
                continue
            if found.hash_dependencies() != planned[found.name]:
                failures[found.name] = "what it depends on has changed meanwhile; run the same command again"
                continue
            try:
                found.save()
                saved.append(found)
            except UserError as error:
                failures[found.name] = str(error)
        project.write_lock_file(saved)
        trained = {task.key for task in tasks if task.stage == "train" and task.name not in failures}
        return failures, pending(project, trained) if trained else []
