"""What a person sees of tasks while they run: a bar, and of a task that failed, its last words. Both from the logs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from altgrad.execution.executor import Task

SHOWN_EVERY = {True: 0.5, False: 30}  # seconds, by whether someone watches or the output is a file
_STEPS_DONE = re.compile(rb" (\d+)/\d+ \[")


class Progress:
    """The bar of tasks of one stage: steps when they train, else cells."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._stage, self._count = tasks[0].stage, len(tasks)
        self._in_steps = self._stage == "train"
        unit = "step" if self._in_steps else "cell"
        self._bar = tqdm(total=sum(task.size for task in tasks), unit=unit, unit_scale=True)
        self._ended = self._done = 0
        self._shown = 0.0

    def ended(self, task: Task) -> None:
        """Count a task that has ended, well or not."""
        self._ended += 1
        self._done += task.size

    def show(self, running: Sequence[Task]) -> None:
        """Draw the bar if it is time to, or if nothing is running."""
        if running and time.monotonic() - self._shown <= SHOWN_EVERY[sys.stderr.isatty()]:
            return
        self._shown = time.monotonic()
        self._bar.n = self._done + sum(steps_done(task.log) for task in running if self._in_steps)
        self._bar.set_description(f"{self._stage} {self._ended}/{self._count}", refresh=False)
        self._bar.set_postfix_str(" ".join(task.key for task in running), refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.close()


def steps_done(log: Path) -> int:
    """Return the step that the progress bar in ``log`` last showed, or 0."""
    found = _STEPS_DONE.findall(log.read_bytes()[-4096:]) if log.exists() else []
    return int(found[-1]) if found else 0


def last_line(log: Path) -> str:
    """Return the last line of ``log``, which names the mistake if there was one."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = (line.strip() for line in reversed(text.replace("\r", "\n").split("\n")))
    return next((line for line in lines if line), "it said nothing")
