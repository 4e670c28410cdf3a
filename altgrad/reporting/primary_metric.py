"""The primary metric: the number that a study compares, its unit, which way is better, the smallest effect of interest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from altgrad.config.tasks import Compared
from altgrad.reporting.decision_rule import HIGHER, LOWER, SMALLEST_EFFECT

LOSS = Compared()
SMALLEST_SHARE = 0.005  # smallest effect of interest in F1 and the like: half a percentage point


@dataclass(frozen=True)
class PrimaryMetric:
    """The metric that is compared, the validation loss by default.

    Attributes:
        final, on_validation, title, unit, higher_is_better: as in `altgrad.config.tasks.Compared`. The learning rate is
            chosen, and curves are drawn, by the metric on validation data.
        entry: the report's noun for a grid entry, "format" or "configuration".
        smallest_effect: the smallest effect of interest, in the metric's unit.
    """

    final: str = LOSS.final
    on_validation: str = LOSS.on_validation
    title: str = LOSS.title
    unit: str = LOSS.unit
    higher_is_better: bool = LOSS.higher_is_better
    entry: str = "format"
    smallest_effect: float = SMALLEST_EFFECT

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> PrimaryMetric:
        """Return the primary metric that ``params``, the settings in a grid's index, select."""
        compared = Compared.of(params)
        return cls(*compared, smallest_effect=SMALLEST_SHARE if compared.higher_is_better else SMALLEST_EFFECT)

    @property
    def noun(self) -> str:
        """The short name, as in "Δ loss"."""
        return self.title.removeprefix("validation ")

    @property
    def full(self) -> str:
        """The title, followed by "of test documents" if the metric is measured on the test split."""
        return f"{self.title} of test documents" if self.final.startswith("test_") else self.title

    @property
    def outcomes(self) -> tuple[str, str]:
        """The outcomes of a better and of a worse result: "lower" and "higher", or the reverse."""
        return (HIGHER, LOWER) if self.higher_is_better else (LOWER, HIGHER)

    @property
    def direction(self) -> str:
        """A sentence that says which way is better."""
        text = self.labelled(f"{self.delta} is method minus reference, paired by seed")
        return f"{text}: {'above' if self.higher_is_better else 'below'} zero is better."

    @property
    def delta(self) -> str:
        """The name of a difference: method minus reference."""
        return f"Δ {self.noun}"

    @property
    def in_nats(self) -> bool:
        """Whether the unit is nats per token, so that there is a perplexity."""
        return self.unit == LOSS.unit

    def with_unit(self, text: str) -> str:
        """Return ``text`` with a comma and the unit at its end, if there is a unit."""
        return f"{text}, {self.unit}" if self.unit else text

    def labelled(self, text: str) -> str:
        """Return ``text`` with the unit in brackets behind it, if there is a unit."""
        return f"{text} ({self.unit})" if self.unit else text
