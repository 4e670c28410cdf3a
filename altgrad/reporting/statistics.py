"""Paired differences of losses: mean, interval and p-value by Student's paired t, each comparison by itself.

Seeds are blocks. A seed fixes the initial weights and the order of the batches in every arm, so two arms are compared
seed by seed and what a seed does to both cancels. No comparison lends its spread to another: intervals and p-values are
those of ``scipy.stats.ttest_rel``. STATISTICS.md in this package says why. What many comparisons cost each other is in
:mod:`altgrad.reporting.multiplicity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95


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

    @property
    def error(self) -> float:
        """The standard error of the mean, with ``n - 1`` degrees of freedom; NaN for one seed."""
        return self.sd / math.sqrt(self.n)

    @property
    def half_width(self) -> float:
        """Half of the 95 % interval of the mean by itself; NaN for one seed and where nothing spreads."""
        return t_quantile(self.n - 1) * self.error if self.sd > 0 else math.nan

    def p_value(self, least: float = 0.0) -> float:
        """Return the two-sided p-value of a mean beyond ``least``, by itself; NaN where `half_width` is."""
        if not self.sd > 0:
            return math.nan
        beyond = [(side * least - abs(self.mean)) / self.error for side in (1, -1)]
        return float(min(1.0, sum(stdtr(self.n - 1, beyond))))


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
    """Return the mean over seeds and the ends of its 95 % interval; NaN where `Difference` has no interval."""
    found = summarised(np.asarray(differences))
    if found is None:
        return math.nan, math.nan, math.nan
    return found.mean, found.mean - found.half_width, found.mean + found.half_width


def outlier(values: np.ndarray) -> tuple[int, float]:
    """Return the place of the value farthest from the mean of all, and the p-value that it belongs to the others.

    Two-sided (F. E. Grubbs, "Sample criteria for testing outlying observations", Annals of Mathematical Statistics 21,
    1950), as the t of that value minus the mean of the others. ``values``: float64, (n,), NaN for none. p is 1 for
    fewer than three, and where the others are equal.
    """
    count = int(np.isfinite(values).sum())
    if count < 3:
        return 0, 1.0
    place = int(np.nanargmax(np.abs(values - np.nanmean(values))))
    others = summarised(np.delete(values, place))
    if others is None or not others.sd > 0:
        return place, 1.0
    t = abs(values[place] - others.mean) / (others.sd * math.sqrt(1 + 1 / others.n))
    return place, float(min(1.0, 2 * count * stdtr(count - 2, -t)))
