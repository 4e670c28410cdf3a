"""What finished tasks wrote is handed over to DVC, many at a time.

Every hand-over reads and writes the whole of dvc.lock, so that it takes longer the more cells there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from altgrad.config import UserError
from altgrad.execution import dvc_api
from altgrad.execution.executor import Task
from altgrad.execution.plan import pending

# Seconds between two, at least, and as a multiple of what the last one took. Cells train on the same cores: at five
# times as long, a grid of 240 of them took a fifth of one core from two.
EVERY, TIMES_AS_LONG = 20, 15


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
        """Keep a finished task for the next hand-over."""
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
