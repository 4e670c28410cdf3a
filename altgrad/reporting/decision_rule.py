"""The rule by which reports and the study judge a difference in loss: adjusted p-values, and the result in words.

A difference is method minus reference, so below zero is better. It is *significant* where the p-value of its paired
t-test, adjusted for its family, is at most 5 %, over at least five paired seeds. "No effect" is a result of its own:
the 95 % interval lies within the smallest effect of interest (equivalence, D. J. Schuirmann, Journal of
Pharmacokinetics and Biopharmaceutics 15, 1987; two one-sided tests, each at 2.5 %). Every other difference is
*inconclusive*, and comes with the smallest effect that would have been found nine times in ten.

Without controls the adjustment is Holm's step-down (S. Holm, Scandinavian Journal of Statistics 6, 1979). With them
it is the graphical procedure of F. Bretz, W. Maurer, W. Brannath and M. Posch, "A graphical approach to sequentially
rejective multiple test procedures", Statistics in Medicine 28, 2009. Both keep the chance of any false result at 5 %,
whichever questions have no effect and however their data depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy.special import nctdtrinc

from altgrad.reporting.statistics import Difference, t_quantile

LEVEL = 0.05
SEEDS = 5  # the fewest paired seeds of a test
#: Nats per token: the spread between seeds of a default run, and the gain from 1 % more tokens (reports/study).
SMALLEST_EFFECT = 0.005
SEEN = 0.9  # how often the same seeds would find an effect of the size ``Result.visible``

LOWER, HIGHER, NO_EFFECT, INCONCLUSIVE = "lower", "higher", "no effect", "inconclusive"
TOO_FEW, TUNED_HERE, IDENTICAL = f"n < {SEEDS}, no test", "rates chosen on these seeds, no test", "identical"
NO_SPREAD = "zero spread, no test"  # the same difference in every seed
UNTESTED, NONE_SEEN = (TOO_FEW, TUNED_HERE, NO_SPREAD), (NO_EFFECT, IDENTICAL)

Name = TypeVar("Name", bound=Hashable)


def adjusted(
    p_values: Mapping[Name, float], controls: Mapping[Name, Sequence[Name]] | None = None
) -> dict[Name, float]:
    """Return the adjusted p-value of each question: the smallest joint level at which it is significant; at most 1.

    Args:
        p_values: the unadjusted p-value of every question, controls included.
        controls: by primary question, the controls that are asked once it is significant. A question is the control of
            at most one other; one that is nobody's control is primary. Each of m primary questions begins with 1/m of
            the level. A significant question hands its share to its controls, or else to the open primary questions.
    """
    names, controls = list(p_values), controls or {}
    place = {name: i for i, name in enumerate(names)}
    dependent = {control for of_one in controls.values() for control in of_one}
    primary = [name for name in names if name not in dependent]
    p, weights = np.array(list(p_values.values())), np.array([name not in dependent for name in names], float)
    weights /= max(1, len(primary))
    passes = np.zeros((len(names), len(names)))
    for name in names:
        heirs = controls.get(name) or [other for other in primary if other != name]
        passes[place[name], [place[heir] for heir in heirs]] = 1 / max(1, len(heirs))
    levels, level, still_open = dict.fromkeys(names, 1.0), 0.0, np.ones(len(names), bool)
    while still_open.any():  # algorithm 2 of Bretz et al. 2009
        needed = np.where(still_open & (weights > 0), p / np.where(weights > 0, weights, 1), np.inf)
        j = int(needed.argmin())
        level = max(level, float(needed[j]))
        if level >= 1:
            break
        levels[names[j]], still_open[j] = level, False
        weights = weights + weights[j] * passes[j]
        through, left = passes + np.outer(passes[:, j], passes[j]), 1 - passes[:, j] * passes[j]
        passes = np.where(left[:, None] > 1e-12, through / np.where(left > 1e-12, left, 1)[:, None], 0.0)
        weights[j] = passes[j] = passes[:, j] = 0
        np.fill_diagonal(passes, 0)
    return levels


@dataclass(frozen=True)
class Result:
    """A mean paired difference, its p-value adjusted for its family, and the outcome in words.

    ``visible`` is the smallest effect that the same seeds would have found nine times in ten without adjustment; NaN
    where there is nothing to test. ``exploratory`` marks a question that was not asked beforehand.
    """

    difference: Difference
    adjusted: float
    visible: float
    outcome: str
    exploratory: bool = False

    @property
    def half_width(self) -> float:
        """Half of the unadjusted 95 % interval; NaN where there is none."""
        return self.difference.half_width

    @property
    def significant(self) -> bool:
        """Whether the loss is significantly lower or higher."""
        return self.outcome in (LOWER, HIGHER)

    @property
    def alone(self) -> float:
        """The unadjusted p-value of the paired t-test; NaN where there is nothing to test."""
        return self.difference.p_value()


def judged(differences: Mapping[Name, Difference], seeds: int = SEEDS) -> dict[Name, Result]:
    """Return the result of each comparison of a family, adjusted by Holm; with fewer than ``seeds`` seeds, no test."""
    levels = adjusted({
        name: 1.0 if difference.is_zero else difference.p_value() for name, difference in differences.items()
        if difference.n > 1 and (difference.is_zero or difference.sd > 0)
    })  # fmt: skip
    return {name: judge(difference, levels.get(name, math.nan), seeds) for name, difference in differences.items()}


def judge(difference: Difference, level: float, seeds: int = SEEDS, smallest_effect: float = SMALLEST_EFFECT) -> Result:
    """Return the result of one comparison.

    Args:
        difference: the mean difference over paired seeds.
        level: the p-value of ``difference``, adjusted for its family.
        seeds: the fewest seeds of a test.
        smallest_effect: the smallest effect of interest, in the unit of the difference.
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
