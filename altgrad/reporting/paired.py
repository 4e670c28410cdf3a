"""Student's t over differences that are paired by seed: a test, an interval, and the interval as text.

A difference is NaN where one of its two runs has no loss: it says nothing of either side and is left out.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pandas as pd
from scipy.special import stdtr

from altgrad.reporting.statistics import summarised, t_quantile
from altgrad.reporting.wording import signed

Differences: TypeAlias = np.ndarray | pd.Series  # one per seed


def mean(differences: Differences) -> float:
    """Return the mean over the seeds that have a difference; NaN without one."""
    found = summarised(np.asarray(differences))
    return np.nan if found is None else found.mean


def two_sided(differences: Differences) -> float:
    """Return the p-value of Student's t-test that ``differences`` have a mean of zero; 1 if they have no spread."""
    found = summarised(np.asarray(differences))
    if found is None or not found.sd > 0:
        return 1.0
    t = abs(found.mean) / (found.sd / np.sqrt(found.n))
    return float(2 * stdtr(found.n - 1, -t))


def interval(differences: Differences) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 95 % interval by Student's t; NaN with fewer than two."""
    found = summarised(np.asarray(differences))
    if found is None or found.n < 2:
        return np.nan, np.nan, np.nan
    half = t_quantile(found.n - 1) * found.sd / np.sqrt(found.n)
    return found.mean, found.mean - half, found.mean + half


def with_interval(differences: Differences, digits: int = 4) -> str:
    """Return the mean over seeds and its 95 % interval as text."""
    mean, low, high = (signed(value, digits) for value in interval(differences))
    return f"{mean} [{low}, {high}]" if np.isfinite(interval(differences)[0]) else "not measured"
