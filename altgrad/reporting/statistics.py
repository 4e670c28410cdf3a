"""The statistics of a single comparison: paired differences, and shares.

Seeds are blocks. A seed fixes the initial weights and the order of the batches in every arm, so two
arms are compared seed by seed and what a seed does to both cancels. What many comparisons know of each
other's spread is in :mod:`altgrad.reporting.moderation`, what they cost each other in
:mod:`altgrad.reporting.multiplicity`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

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
        """Whether the two were equal to the last bit in every seed."""
        return self.mean == 0 and not self.sd > 0


def summarised(differences: np.ndarray) -> Difference | None:
    """Return mean and spread of ``differences``, one per seed, NaN where a run has no loss; ``None`` without one."""
    known = differences[np.isfinite(differences)]
    if len(known) == 0:
        return None
    return Difference(len(known), float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan)


def interval(differences: np.ndarray | pd.Series) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 95 % interval by Student's t; NaN with fewer than two."""
    found = summarised(np.asarray(differences))
    if found is None or found.n < 2:
        return math.nan, math.nan, math.nan
    half = t_quantile(found.n - 1) * found.sd / math.sqrt(found.n)
    return found.mean, found.mean - half, found.mean + half
