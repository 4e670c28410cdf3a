"""How fast a study goes, how long it will go on, and what that costs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from altgrad.watch.project import FAILED, PAUSED, TRAINS, Seen

WINDOW = 120  # seconds over which the pace is measured


class Pace:
    """Steps per second over all cells, from looks at them, and what follows for the rest.

    ``began``: the file that is there while cells are run, and as old as that.
    """

    def __init__(self, began: Path) -> None:
        self._began = began
        self._looks: deque[tuple[float, int]] = deque()
        self._left = 0
        self._goes = False

    def look(self, cells: Iterable[Seen]) -> None:
        """Take in how far the cells are."""
        now = time.monotonic()
        done = self._left = 0
        self._goes = False
        for cell in cells:
            step = cell.steps if cell.is_over else cell.step
            done += step
            self._left += 0 if cell.is_over or cell.state in (FAILED, PAUSED) else cell.steps - step
            self._goes = self._goes or cell.state == TRAINS
        if self._looks and done < self._looks[-1][1]:  # a cell began anew
            self._looks.clear()
        self._looks.append((now, done))
        while now - self._looks[0][0] > WINDOW and len(self._looks) > 2:
            self._looks.popleft()

    def summary(self) -> dict[str, float | None]:
        """Return ``steps_per_s`` over the last two minutes, ``seconds_left`` and ``elapsed``, ``None`` if unknown."""
        (began, first), (ended, last) = self._looks[0], self._looks[-1]
        rate = (last - first) / (ended - began) if ended > began else 0.0
        goes = self._goes and rate > 0
        return {
            "steps_per_s": rate if goes else None, "seconds_left": self._left / rate if goes else None,
            "elapsed": time.time() - self._began.stat().st_mtime if self._began.exists() else None,
        }  # fmt: skip
