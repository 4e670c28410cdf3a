"""A recipe that changes during a run: the recipe that the run begins with, and when another recipe takes over.

These are the settings in ``recipes:``. `CellSwitch` is a switch in a resolved cell, with the rules of its recipe. A run
only moves forward through the schedule. Once the share of a switch has passed (``after``), the run is at this switch or
a later one. An event moves the run to the next switch with ``when``, if that switch waits for this event.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated

from pydantic import Field

from altgrad.config.base import Settings
from altgrad.config.recipe import Rule


class Trigger(Settings):
    """What makes a run change its recipe; any of them does."""

    overflow: float | None = Field(
        None, gt=0, lt=1, description="an instrumented pass saw more than this share of a tensor beyond its format's "
        "largest value"
    )  # fmt: skip
    spike: float | None = Field(
        None, gt=1, le=1e9, description="the smoothed loss is above this multiple of its minimum under the recipe"
    )
    nonfinite: bool = Field(False, description="a loss or gradient is NaN or infinite; the step is done again")

    def mistakes(self) -> Iterator[str]:
        if not self.changed():
            yield "waits for nothing; write overflow: 0.01, spike: 1.5 or nonfinite: true"


class Switch(Settings):
    """A change of recipe, ``after`` a share of the steps or ``when`` something happens. All weights and the optimizer's
    state are kept. A tensor keeps its amax history if it has one of the same length; other scales begin anew.
    """

    recipe: str = Field(min_length=1, description="entry of a grid, such as bf16, E5M2 or uniform_row.E5M2")
    after: float | None = Field(None, gt=0, lt=1, description="share of the steps before it, rounded to whole steps")
    when: Trigger | None = Field(None, description="what it waits for")

    def mistakes(self) -> Iterator[str]:
        if (self.after is None) == (self.when is None):
            yield "needs either after, a share of the steps, or when"


class ChangingRecipe(Settings):
    """A recipe that changes during a run. ``FORMAT`` in the recipes that it names is the format of the grid's entry."""

    recipe: str = Field(min_length=1, description="entry of a grid that a run begins with, such as NVFP4")
    schedule: Annotated[list[Switch], Field(min_length=1)] = Field(description="what takes over, in order")

    def mistakes(self) -> Iterator[str]:
        for earlier, later in pairwise(switch.after for switch in self.schedule if switch.after is not None):
            if later <= earlier:
                yield f"schedule has after {later} behind after {earlier}; list them in their order"

    @property
    def names(self) -> dict[str, str]:
        """Grid entries that this recipe names, by setting: ``{"recipe": "NVFP4", "schedule[0].recipe": "bf16"}``."""
        return {"recipe": self.recipe} | {f"schedule[{i}].recipe": s.recipe for i, s in enumerate(self.schedule)}


class CellSwitch(Switch):
    """A change of recipe in a resolved cell, with the rules of the new recipe."""

    rules: list[Rule]

    def is_over(self, done: int, steps: int) -> bool:
        """Whether the share ``after`` has passed when ``done`` of ``steps`` steps are done; False without ``after``."""
        return self.after is not None and done >= round(self.after * steps)
