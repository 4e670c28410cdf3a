"""Paired differences, and how far apart equal arms end by chance: what the comparisons of a grid know together.

Seeds are blocks. A seed fixes the initial weights and the order of the batches in every arm, so two arms are compared
seed by seed and what a seed does to both cancels.

The spread of many comparisons is known by the moderated t statistic (G. K. Smyth, Statistical Applications in Genetics
and Molecular Biology 3, 2004): a comparison's variance is the mean of its own and one that all share, ``s0^2``,
weighted by their degrees of freedom. STATISTICS.md in this package says why, and what is done more carefully than
there. What many comparisons cost each other is in :mod:`altgrad.reporting.multiplicity`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import brentq
from scipy.special import chdtri, fdtrc, polygamma, psi, stdtr, stdtrit

CONFIDENCE = 0.95
DOUBT = 0.1  # chance that log variances as unequal as they are taken to be show no more inequality than was found
UNLIKE = 0.05  # chance of a spread like that of a difference that stands alone, if it were one of the others


def t_quantile(dof: float) -> float:
    """Return the two-sided 95 % quantile of Student's t with ``dof`` degrees of freedom."""
    return float(stdtrit(dof, 0.5 + CONFIDENCE / 2))


@dataclass(frozen=True)
class Difference:
    """A mean paired difference over ``n`` seeds and the standard deviation of the differences, NaN for one seed."""

    n: int
    mean: float
    sd: float

    @property
    def is_zero(self) -> bool:
        """Whether the two were equal in every seed, but for rounding."""
        return self.mean == 0 and not self.sd > 0


def summarised(differences: np.ndarray, losses: float = 0.0) -> Difference | None:
    """Return mean and spread of ``differences``, one per seed, NaN where a run has no loss; ``None`` without one.

    ``losses`` is how large those are that a difference is made of, together. A spread that their rounding makes is
    zero, and so is a mean beside it: 3.51 - 3.5 is 0.01 but for the last digits, which differ from 3.71 - 3.7.
    """
    known = differences[np.isfinite(differences)]
    if len(known) == 0:
        return None
    mean, sd = float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan
    rounding = 2 * np.finfo(np.float64).eps * losses
    return Difference(len(known), 0.0 if sd <= rounding >= abs(mean) else mean, 0.0 if sd <= rounding else sd)


def interval(differences: np.ndarray | pd.Series) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 95 % interval by Student's t; NaN with fewer than two."""
    found = summarised(np.asarray(differences))
    if found is None or found.n < 2:
        return math.nan, math.nan, math.nan
    half = t_quantile(found.n - 1) * found.sd / math.sqrt(found.n)
    return found.mean, found.mean - half, found.mean + half


@dataclass(frozen=True)
class Spread:
    """What is known of the standard deviation of the paired differences of one kind.

    Attributes:
        variance: s0 squared, of the differences in loss between two equal arms from seed to seed.
        prior: d0, the degrees of freedom that it counts for beside a comparison's own; infinite where all agree.
        dof: degrees of freedom with which ``variance`` itself is known: no test has more.
        least: a difference between equal arms that no number of seeds takes away, in nats per token.
    """

    variance: float
    prior: float
    dof: float
    least: float = 0.0

    def error(self, difference: Difference) -> tuple[float, float]:
        """Return the standard error of a mean difference and its degrees of freedom; NaN for one seed."""
        if difference.n < 2:
            return math.nan, math.nan
        own = difference.n - 1
        if self._stands_alone(difference):
            return difference.sd / math.sqrt(difference.n), own
        weight = 1.0 if math.isinf(self.prior) else self.prior / (self.prior + own)
        variance = weight * self.variance + (1 - weight) * difference.sd**2
        return math.sqrt(variance / difference.n), max(own, min(self.prior + own, self.dof))

    def _stands_alone(self, difference: Difference) -> bool:
        """Whether a difference spreads more than the others let expect, so that it is read by its own spread alone."""
        if not self.variance > 0 or not self.prior > 0:
            return True
        known = self.dof if math.isinf(self.prior) else min(self.prior, self.dof)
        return bool(fdtrc(difference.n - 1, known, difference.sd**2 / self.variance) < UNLIKE)

    def p_value(self, difference: Difference) -> float:
        """Return the two-sided p-value of a difference beyond ``least``; 1 for one seed, which says nothing."""
        error, dof = self.error(difference)
        size = abs(difference.mean)
        if not error > 0:
            return 0.0 if error == 0 and size > self.least else 1.0
        return float(min(1.0, stdtr(dof, (self.least - size) / error) + stdtr(dof, (-self.least - size) / error)))

    def half_width(self, difference: Difference) -> float:
        """Return half of the 95 % interval of a mean difference; NaN for one seed and where nothing spreads."""
        error, dof = self.error(difference)
        return t_quantile(dof) * error if error > 0 else math.nan

    def floor(self, n: int) -> float:
        """Return the difference that two equal arms stay below 19 times in 20, over ``n`` seeds."""
        return max(self.least, t_quantile(self.dof) * math.sqrt(self.variance / n))


def fitted(differences: Sequence[Difference], contrasts: np.ndarray) -> Spread | None:
    """Return the spread of ``differences``; ``None`` where none has two seeds and a spread.

    Args:
        differences: of one kind: each holds the same number of runs.
        contrasts: float64, (differences, runs): with which sign each run's loss enters each of them.
    """
    kept = [i for i, difference in enumerate(differences) if difference.n > 1 and difference.sd > 0]
    if not kept:
        return None
    variances = np.array([differences[i].sd ** 2 for i in kept])
    dof = np.array([differences[i].n - 1.0 for i in kept])
    related = _relation(contrasts[kept])
    effective = float(dof.sum() ** 2 / (np.sqrt(dof) @ related @ np.sqrt(dof)))
    variance, prior = _prior(variances, dof, related)
    return Spread(variance, prior, effective)


def _relation(contrasts: np.ndarray) -> np.ndarray:
    """Return the correlation of the variance estimates of two contrasts: the square of that of the contrasts."""
    norms = np.linalg.norm(contrasts, axis=1)
    return (contrasts @ contrasts.T / np.outer(norms, norms)) ** 2


def _prior(variances: np.ndarray, dof: np.ndarray, related: np.ndarray) -> tuple[float, float]:
    """Return s0 squared and d0 by the moments of log variances (Smyth 2004, section 6.2); d0 is 0 for one variance."""
    count = len(variances)
    if count == 1:
        return float(variances[0]), 0.0
    logs = np.log(variances) - psi(dof / 2) + np.log(dof / 2)  # with the mean of log sigma^2
    centre = float(np.exp(logs.mean()))
    shared = (related.sum() - count) / (count * (count - 1))  # what all have in common does not show between them
    if shared >= 1:
        return centre, 0.0
    between = logs.var(ddof=1) / (1 - shared)
    at_most = between * (count - 1) / float(chdtri(count - 1, 1 - DOUBT))
    excess = at_most - polygamma(1, dof / 2).mean()
    return centre, 2 * _inverse_trigamma(excess) if excess > 0 else math.inf


def _inverse_trigamma(value: float) -> float:
    """Return x with trigamma(x) = value. Trigamma lies between 1/x + 1/(2 x^2) and 1/x + 1/x^2, so x between theirs."""
    if value < 1e-6:
        return 1 / value
    low, high = ((1 + math.sqrt(1 + steep * value)) / (2 * value) for steep in (2, 4))
    return float(brentq(lambda x: polygamma(1, x) - value, low, high))
