"""Which recipe of a cell's schedule is on, and when the next one takes over.

What decides is known before a step, of the steps before it and of the batch at hand, and is in the checkpoint or comes
again, so that a run that is resumed on either side of a change goes on with the same bits. An overflow is seen by
instrumented passes alone: here, and nowhere else, how often one looks decides what one sees.
"""

from __future__ import annotations

import math
from typing import Any

from altgrad.config import Cell

TINY = 1e-300  # a loss that nothing is divided by


class Switches:
    """The place of ``cell`` in its schedule: 0 is what it begins with, 1 the first that takes over.

    ``made`` has for each change its ``step``, the first in the new recipe, that ``recipe``'s name, its ``place``, and
    ``why``: after, overflow, spike or nonfinite. ``least`` is the smallest smoothed loss from the last one on.
    """

    def __init__(self, cell: Cell, made: list[dict[str, Any]] | None = None, least: float | None = None) -> None:
        self._cell, self.made = cell, made or []
        self._least = math.inf if least is None else least
        self._smoothed = math.inf

    @property
    def place(self) -> int:
        return self.made[-1]["place"] if self.made else 0

    @property
    def recipe(self) -> str:
        """The name of the recipe that is on: that of the grid's entry at first."""
        return self.made[-1]["recipe"] if self.made else self._cell.format

    def state(self) -> dict[str, Any]:
        """Return what ``Switches(cell, **state)`` is restored of, as plain values."""
        return {"made": self.made, "least": None if math.isinf(self._least) else self._least}

    def before(self, step: int, smoothed: float | None) -> bool:
        """Return whether the recipe changes before ``step``, by its share of the steps or by the loss so far."""
        self._smoothed = math.inf if smoothed is None else smoothed
        self._least = min(self._least, self._smoothed)
        over = [s.is_over(step - 1, self._cell.train.steps) for s in self._cell.schedule]
        last = max((i for i, it_is in enumerate(over, 1) if it_is), default=0)
        if last > self.place:
            return self._change(step, last, "after")
        return not math.isinf(self._smoothed) and self.when(step, spike=self._smoothed / max(self._least, TINY))

    def when(self, step: int, **seen: float) -> bool:
        """Change to the next recipe that waits for something if it waits for what was ``seen``; return whether it does.

        That is one of: ``spike``, ``overflow``, the share of a tensor of the step's batch, ``nonfinite``.
        """
        waiting = [(i, s.when) for i, s in enumerate(self._cell.schedule, 1) if i > self.place and s.when is not None]
        ((name, value),) = seen.items()
        limit = getattr(waiting[0][1], name) if waiting else None
        if not limit or not (value is True or value > limit):
            return False
        return self._change(step, waiting[0][0], name)

    def _change(self, step: int, place: int, why: str) -> bool:
        recipe = self._cell.schedule[place - 1].recipe
        self.made = [*self.made, {"step": step, "recipe": recipe, "place": place, "why": why}]
        self._least = self._smoothed
        return True
