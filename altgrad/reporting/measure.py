"""What a study compares: the number, its unit, which way is better, and the smallest effect of interest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from altgrad.config.tasks import Compared
from altgrad.reporting.decision_rule import HIGHER, LOWER, SMALLEST_EFFECT

SMALLEST_SHARE = 0.005  # of F1 and its like: half a point in a hundred


@dataclass(frozen=True)
class Measure:
    """What is measured of each run, and what tables and axes call it.

    Attributes:
        noun: the field's word for it, as in "Δ loss"; ``full`` where there is room.
        unit: its unit; empty where nobody has said it.
        entry: what the runs differ by besides optimizer and seed.
        higher_is_better: which way is better.
        smallest_effect: below it an effect is of no interest, in the same unit.
        column: where a run's final value stands, and ``on_validation`` that of validation data, by which a learning
            rate is chosen and which curves show.
    """

    noun: str = "loss"
    full: str = "validation loss"
    unit: str = "nats per token"
    entry: str = "format"
    higher_is_better: bool = False
    smallest_effect: float = SMALLEST_EFFECT
    column: str = "val_loss"
    on_validation: str = "val_loss"

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Measure:
        """Return what the settings of a grid's index compare."""
        found = Compared.of(params)
        if not found.higher_is_better:
            return cls()
        return cls(
            found.title, f"{found.title} of test documents", found.unit, higher_is_better=True,
            smallest_effect=SMALLEST_SHARE, column=found.final, on_validation=found.on_validation,
        )  # fmt: skip

    @property
    def outcomes(self) -> tuple[str, str]:
        """The outcome of a result that is better, and of one that is worse."""
        return (HIGHER, LOWER) if self.higher_is_better else (LOWER, HIGHER)

    @property
    def direction(self) -> str:
        """Which way is better, in a sentence."""
        said = self.labelled(f"{self.delta} is method minus reference, paired by seed")
        return f"{said}: {'above' if self.higher_is_better else 'below'} zero is better."

    @property
    def delta(self) -> str:
        """Method minus reference, as a column's head has it."""
        return f"Δ {self.noun}"

    @property
    def in_nats(self) -> bool:
        """Whether it has a perplexity."""
        return self.unit == Measure.unit

    def with_unit(self, text: str) -> str:
        """Return a sentence with the unit at its end."""
        return f"{text}, {self.unit}" if self.unit else text

    def labelled(self, text: str) -> str:
        """Return an axis' label with the unit behind it."""
        return f"{text} ({self.unit})" if self.unit else text
