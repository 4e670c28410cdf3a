"""What a difference in loss amounts to: the one rule by which reports and the study judge it.

A difference is that of a method to its reference, so below zero is better. It is *significant* where the p-value of its
paired t-test, adjusted for its family by Holm's step-down, is at most 5 %, over at least five paired seeds. "No effect"
is a claim of its own: the 95 % interval lies within the smallest effect of interest (equivalence, D. J. Schuirmann,
Journal of Pharmacokinetics and Biopharmaceutics 15, 1987; two one-sided tests, each at 2.5 %). All else is
inconclusive, and says which effect would have been seen nine times in ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import nctdtrinc

from altgrad.reporting.multiplicity import Question, adjusted
from altgrad.reporting.statistics import Difference, t_quantile

LEVEL = 0.05
SEEDS = 5  # fewer paired seeds than this make no claim
#: Nats per token: what a default run's seeds differ by, and what 1 % more tokens are worth there (reports/study).
SMALLEST_EFFECT = 0.005
SEEN = 0.9  # how often an effect is found that is called visible

LOWER, HIGHER, NO_EFFECT, INCONCLUSIVE = "lower", "higher", "no effect", "inconclusive"
TOO_FEW, TUNED_HERE, IDENTICAL = f"n < {SEEDS}, no test", "rates chosen on these seeds, no test", "identical"
NO_SPREAD = "zero spread, no test"  # the same difference in every seed
UNTESTED, NONE_SEEN = (TOO_FEW, TUNED_HERE, NO_SPREAD), (NO_EFFECT, IDENTICAL)


@dataclass(frozen=True)
class Result:
    """A mean paired difference, its p-value adjusted for its family, and what it amounts to.

    ``visible`` is the smallest effect that the same seeds would have found nine times in ten, by itself; NaN where
    there is nothing to test.
    """

    difference: Difference
    adjusted: float
    visible: float
    outcome: str
    exploratory: bool = False  # nobody had asked for it beforehand

    @property
    def half_width(self) -> float:
        """Half of the difference's 95 % interval by itself; NaN where there is none."""
        return self.difference.half_width

    @property
    def significant(self) -> bool:
        """Whether the difference is one of the two."""
        return self.outcome in (LOWER, HIGHER)

    @property
    def alone(self) -> float:
        """The p-value of the paired t-test by itself; NaN where there is nothing to test."""
        return self.difference.p_value()


def judged(differences: Mapping[Question, Difference], seeds: int = SEEDS) -> dict[Question, Result]:
    """Return the result of each comparison of one family, over paired seeds; fewer than ``seeds`` make no claim."""
    p = {
        name: 1.0 if difference.is_zero else difference.p_value() for name, difference in differences.items()
        if difference.n > 1 and (difference.is_zero or difference.sd > 0)
    }  # fmt: skip
    levels = adjusted(p)
    return {
        name: amount(difference, levels.get(name, math.nan), seeds) for name, difference in differences.items()
    }


def amount(
    difference: Difference, level: float, seeds: int = SEEDS, smallest_effect: float = SMALLEST_EFFECT
) -> Result:
    """Return what a difference amounts to.

    Args:
        difference: over paired seeds.
        level: its p-value, adjusted for its family.
        seeds: the fewest that can make it significant.
        smallest_effect: of interest, in the unit of the difference; an interval within it is no effect.
    """
    if not difference.sd > 0:
        outcome = IDENTICAL if difference.is_zero else TOO_FEW if difference.n < seeds else NO_SPREAD
        return Result(difference, level, math.nan, outcome)
    dof = difference.n - 1
    visible = float(nctdtrinc(dof, 1 - SEEN, t_quantile(dof))) * difference.error
    if level <= LEVEL:
        outcome = LOWER if difference.mean < 0 else HIGHER
    else:
        outcome = NO_EFFECT if abs(difference.mean) + difference.half_width <= smallest_effect else INCONCLUSIVE
    return Result(difference, level, visible, outcome if difference.n >= seeds else TOO_FEW)
