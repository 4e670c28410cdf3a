"""Which recipe of a cell's schedule is in use, and when the next one takes over.

A change depends on earlier steps and the batch of the present step. All data for it is in the checkpoint or is computed
again. So a run that is resumed on either side of a change continues with the same bits. Only instrumented passes see an
overflow, so a change by overflow depends on how often the run is watched. Nothing else does.
"""

from __future__ import annotations

import math
from typing import Any

from altgrad.config import Cell

TINY = 1e-300  # keeps a loss of 0 from being a divisor


class Switches:
    """The place of ``cell`` in its schedule: 0 is the first recipe, 1 the next.

    ``made`` has a dict for each change so far: ``step`` (the first in the new recipe), ``recipe`` (its name), ``place``
    and ``why`` (after, overflow, spike or nonfinite). ``least`` is the smallest smoothed loss since the last change.
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
        """The name of the present recipe; before any change, the cell's format."""
        return self.made[-1]["recipe"] if self.made else self._cell.format

    def state(self) -> dict[str, Any]:
        """Return plain values; ``Switches(cell, **state)`` restores this object from them."""
        return {"made": self.made, "least": None if math.isinf(self._least) else self._least}

    def before(self, step: int, smoothed: float | None) -> bool:
        """Change the recipe before ``step`` if a scheduled share of the steps is over or the ``smoothed`` loss spikes.

        Returns whether the recipe changes. ``smoothed`` is ``None`` before the first step.
        """
        self._smoothed = math.inf if smoothed is None else smoothed
        self._least = min(self._least, self._smoothed)
        over = [s.is_over(step - 1, self._cell.train.steps) for s in self._cell.schedule]
        last = max((i for i, it_is in enumerate(over, 1) if it_is), default=0)
        if last > self.place:
            return self._change(step, last, "after")
        return not math.isinf(self._smoothed) and self.when(step, spike=self._smoothed / max(self._least, TINY))

    def when(self, step: int, **seen: float) -> bool:
        """Change to the next recipe with a ``when``, if ``seen`` exceeds its limit; return whether the recipe changes.

        ``seen`` is one keyword: ``spike`` (a ratio), ``overflow`` (a share of a tensor) or ``nonfinite=True``.
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
