"""What a difference in loss amounts to: the one rule by which reports and the study judge it.

A difference is that of a method to its reference, so below zero is better. It is *significant* where its p-value,
adjusted for its family by Holm's step-down, is at most 5 %, over at least five paired seeds. "No effect" is a claim of
its own: the 95 % interval lies within the smallest effect of interest (equivalence, D. J. Schuirmann, Journal of
Pharmacokinetics and Biopharmaceutics 15, 1987; two one-sided tests, each at 2.5 %). All else is inconclusive, and says
which effect would have been seen nine times in ten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import nctdtrinc

from altgrad.reporting.multiplicity import Question, adjusted
from altgrad.reporting.statistics import Difference, Spread, fitted, t_quantile

LEVEL = 0.05
SEEDS = 5  # fewer paired seeds than this make no claim
#: Nats per token: what a default run's seeds differ by, and what 1 % more tokens are worth there (reports/study).
SMALLEST_EFFECT = 0.005
SEEN = 0.9  # how often an effect is found that is called visible
MODERATED = 5  # comparisons, from which on they share what they know of their spread

LOWER, HIGHER, NO_EFFECT, INCONCLUSIVE = "lower", "higher", "no effect", "inconclusive"
TOO_FEW, TUNED_HERE, IDENTICAL = f"n < {SEEDS}, no test", "rates chosen on these seeds, no test", "identical"
NO_SPREAD = "zero spread, no test"  # the same difference in every seed
UNTESTED, NONE_SEEN = (TOO_FEW, TUNED_HERE, NO_SPREAD), (NO_EFFECT, IDENTICAL)


@dataclass(frozen=True)
class Result:
    """A mean paired difference, its 95 % interval by itself, its p-value by itself and within its family.

    ``visible`` is the smallest effect that the same seeds would have found nine times in ten, by itself; NaN where
    there is nothing to test.
    """

    difference: Difference
    half_width: float
    p: float
    adjusted: float
    visible: float
    outcome: str
    exploratory: bool = False  # nobody had asked for it beforehand

    @property
    def significant(self) -> bool:
        """Whether the difference is one of the two."""
        return self.outcome in (LOWER, HIGHER)


def judged(
    differences: Mapping[Question, Difference], contrasts: Mapping[Question, np.ndarray] | None = None
) -> dict[Question, Result]:
    """Return the result of each comparison of one family.

    Args:
        differences: over paired seeds.
        contrasts: float64, (runs,): with which weight each run's loss enters a comparison. With five comparisons or
            more their variances are moderated by one another; without it each is judged by its own alone (Student's
            t), whatever its number of seeds: the rule that the study's first tests were registered with.
    """
    spread = None
    if contrasts is not None and len(differences) >= MODERATED:
        spread = fitted(list(differences.values()), np.array([contrasts[name] for name in differences]))
    spread = spread or Spread(0.0, 0.0, math.inf)  # by which each stands alone
    errors = {name: spread.error(difference) for name, difference in differences.items()}
    p = {
        name: spread.p_value(difference) for name, difference in differences.items()
        if difference.n > 1 and (difference.is_zero or errors[name][0] > 0)
    }  # fmt: skip
    levels, least = adjusted(p), 2 if contrasts is None else SEEDS
    return {
        name: amount(difference, *errors[name], p.get(name, math.nan), levels.get(name, math.nan), least)
        for name, difference in differences.items()
    }


def amount(
    difference: Difference, error: float, dof: float, p: float, level: float, seeds: int = SEEDS,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Result:  # fmt: skip
    """Return what a difference amounts to.

    Args:
        difference: over paired seeds.
        error: its standard error, in its unit, with ``dof`` degrees of freedom.
        p: its p-value by itself, and ``level`` that adjusted for its family.
        seeds: the fewest that can make it significant.
        smallest_effect: of interest, in the unit of the difference; an interval within it is no effect.
    """
    if difference.is_zero or not error > 0:
        outcome = IDENTICAL if difference.is_zero else TOO_FEW if difference.n < seeds else NO_SPREAD
        return Result(difference, math.nan, p, level, math.nan, outcome)
    half = t_quantile(dof) * error
    visible = float(nctdtrinc(dof, 1 - SEEN, t_quantile(dof))) * error
    if level <= LEVEL:
        outcome = LOWER if difference.mean < 0 else HIGHER
    else:
        outcome = NO_EFFECT if abs(difference.mean) + half <= smallest_effect else INCONCLUSIVE
    return Result(difference, half, p, level, visible, outcome if difference.n >= seeds else TOO_FEW)
