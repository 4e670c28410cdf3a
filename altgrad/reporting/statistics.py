"""The statistics of a single comparison: paired differences, divergence of distributions, rank correlation.

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
from scipy.special import ndtri, stdtrit

CONFIDENCE = 0.95
# Share of p that is mixed into q before KL(p || q), so that one empty bin is not an infinite divergence.
KL_MIXTURE = 1e-6


def t_quantile(dof: float) -> float:
    """Return the two-sided 95 % quantile of Student's t with ``dof`` degrees of freedom."""
    return float(stdtrit(dof, 0.5 + CONFIDENCE / 2))


@dataclass(frozen=True)
class Difference:
    """A mean paired difference over ``n`` seeds and the standard deviation of the differences, NaN for one seed."""

    n: int
    mean: float
    sd: float

    def __neg__(self) -> Difference:
        """The same comparison the other way round."""
        return Difference(self.n, -self.mean, self.sd)

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


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share (Journal of the American Statistical Association 22, 1927)."""
    # Not SciPy's binomtest: loading scipy.stats takes a report 0.8 s.
    z, share = float(ndtri(0.5 + CONFIDENCE / 2)), count / total
    middle = (share + z**2 / (2 * total)) / (1 + z**2 / total)
    half = z / (1 + z**2 / total) * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def kl_divergence(p: pd.Series, q: pd.Series) -> float:
    """Return KL(p || q) in bits for two histograms indexed by bin; NaN if either is empty.

    Both are normalised over the union of their bins, and ``q`` is mixed with :data:`KL_MIXTURE` of
    ``p``: the result is exactly 0 for equal histograms and at most ``log2(1 / KL_MIXTURE)``, 20 bits.
    """
    p, q = p.align(q, fill_value=0.0)
    if not (p.sum() > 0 and q.sum() > 0):
        return math.nan
    p_mass = (p / p.sum()).to_numpy(dtype="float64")
    q_mass = (q / q.sum()).to_numpy(dtype="float64")
    q_mass = q_mass + KL_MIXTURE * (p_mass - q_mass)
    present = p_mass > 0
    return float((p_mass[present] * np.log2(p_mass[present] / q_mass[present])).sum())


def rank_correlation(x: pd.Series, y: pd.Series) -> tuple[float, int]:
    """Return Spearman's rho over the labels where both have a value, and their number (NaN below 3)."""
    both = pd.concat([x, y], axis=1, keys=["x", "y"]).dropna()
    if len(both) < 3 or both["x"].nunique() < 2 or both["y"].nunique() < 2:
        return math.nan, len(both)
    return float(both["x"].rank().corr(both["y"].rank())), len(both)
