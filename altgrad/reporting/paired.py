"""Student's t over differences that are paired by seed: a test, an interval, and the interval as text."""

from __future__ import annotations

import numpy as np
from scipy.special import stdtr

from altgrad.reporting.statistics import summarised, t_quantile
from altgrad.reporting.wording import signed


def two_sided(differences: np.ndarray) -> float:
    """Return the p-value of Student's t-test that ``differences``, one per seed, have a mean of zero."""
    found = summarised(differences)
    if found is None or not found.sd > 0:
        return 1.0
    t = abs(found.mean) / (found.sd / np.sqrt(found.n))
    return float(2 * stdtr(found.n - 1, -t))


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 95 % interval by Student's t; NaN with fewer than two."""
    found = summarised(differences)
    if found is None or found.n < 2:
        return np.nan, np.nan, np.nan
    half = t_quantile(found.n - 1) * found.sd / np.sqrt(found.n)
    return found.mean, found.mean - half, found.mean + half


def with_interval(differences: np.ndarray, digits: int = 4) -> str:
    """Return the mean over seeds and its 95 % interval as text."""
    mean, low, high = (signed(value, digits) for value in interval(differences))
    return f"{mean} [{low}, {high}]" if np.isfinite(interval(differences)[0]) else "not measured"
