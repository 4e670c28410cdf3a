"""What a study compares: the number, its unit, which way is better, and the smallest effect of interest."""

from __future__ import annotations

from dataclasses import dataclass

from altgrad.reporting.results import SMALLEST_EFFECT


@dataclass(frozen=True)
class Measure:
    """What is measured of each run, and what tables and axes call it.

    Attributes:
        noun: the field's word for it, as in "Δ loss"; ``full`` where there is room.
        unit: its unit; empty where nobody has said it.
        entry: what the runs differ by besides optimizer and seed.
        higher_is_better: which way is better.
        smallest_effect: below it an effect is of no interest, in the same unit.
    """

    noun: str = "loss"
    full: str = "validation loss"
    unit: str = "nats per token"
    entry: str = "format"
    higher_is_better: bool = False
    smallest_effect: float = SMALLEST_EFFECT

    @property
    def delta(self) -> str:
        """Method minus reference, as a column's head has it."""
        return f"Δ {self.noun}"

    @property
    def in_nats(self) -> bool:
        """Whether it has a perplexity."""
        return self.unit == Measure.unit

    @property
    def best(self) -> str:
        """The end of an ordered list where the best is."""
        return "highest" if self.higher_is_better else "lowest"

    @property
    def from_best(self) -> str:
        """How a run stands to the best, as a column's head has it."""
        return f"minus the {self.best}" if self.higher_is_better else f"above the {self.best}"

    def with_unit(self, text: str) -> str:
        """Return a sentence with the unit at its end."""
        return f"{text}, {self.unit}" if self.unit else text

    def labelled(self, text: str) -> str:
        """Return an axis' label with the unit behind it."""
        return f"{text} ({self.unit})" if self.unit else text
