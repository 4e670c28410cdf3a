"""What finished tasks wrote is handed over to DVC, many at a time.

Every hand-over reads and writes the whole of dvc.lock, so that it takes longer the more cells there are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from altgrad.config import UserError
from altgrad.execution import dvc_api
from altgrad.execution.executor import Task

EVERY, TIMES_AS_LONG = 20, 10  # seconds, and as a multiple of what the last one took


class HandOver:
    """Finished tasks on their way to DVC; ``failures`` says what DVC did not take, and why, by name."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._waiting: list[Task] = []
        self._ended, self._took = time.monotonic(), 0.0  # the last one

    def add(self, task: Task) -> None:
        """Keep a finished task for the next hand-over."""
        self._waiting.append(task)

    def when_due(self, *, last: bool) -> list[str]:
        """Hand over what waits if it is time to, or, where nothing else runs, at once; return what trained."""
        began = time.monotonic()
        if not self._waiting or not (last or began - self._ended > max(EVERY, TIMES_AS_LONG * self._took)):
            return []
        tasks, self._waiting = self._waiting, []
        failures = hand_to_dvc(tasks)
        self.failures |= failures
        self._ended = time.monotonic()
        self._took = self._ended - began
        return [task.key for task in tasks if task.stage == "train" and task.name not in failures]


def hand_to_dvc(tasks: Sequence[Task]) -> dict[str, str]:
    """Put what finished tasks wrote into DVC's cache and lock file; return what went wrong, by name."""
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
    return failures
