"""The statistics of the comparison: paired differences, the noise floor, divergence of distributions.

Seeds are blocks. A seed fixes the initial weights and the order of the batches in every arm, so two
arms are compared seed by seed and what a seed does to both cancels.

*Paired difference*: the mean over seeds of ``a - b`` with Student's t-interval. With two seeds it has
one degree of freedom and a factor of 12.7, which would call almost everything undecided.

*Noise floor*: how far apart two equal arms end by chance. Their losses are modelled as
``loss = arm + seed + residual`` (a randomised block design), fitted by least squares within each
group of arms that share an optimizer and a learning rate. The residual's standard deviation ``s``,
pooled over all groups, is what is left between two arms when nothing but rounding differs, and a
mean difference over n seeds between equal arms exceeds ``t(0.975, dof) * s * sqrt(2 / n)`` one time
in twenty (Fisher's least significant difference). It assumes that the residual is of one size in
every arm. An arm that trains unstably has another: it is left out of the pool and counted, and its own differences are
held against their own spread (see :meth:`Difference.own_floor`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import stdtrit

CONFIDENCE = 0.95
# Share of p that is mixed into q before KL(p || q), so that one empty bin is not an infinite divergence.
KL_MIXTURE = 1e-6
# Times the typical spread of the differences between arms, from which on an arm counts as unstable. Of two equal arms
# with two seeds each, fewer than one in a thousand gets there by chance.
UNSTABLE = 5.0


def t_quantile(dof: float) -> float:
    """Return the two-sided 95 % quantile of Student's t with ``dof`` degrees of freedom."""
    return float(stdtrit(dof, 0.5 + CONFIDENCE / 2))


@dataclass(frozen=True)
class Difference:
    """A mean paired difference over ``n`` seeds; the bounds are NaN for one seed."""

    n: int
    mean: float
    low: float
    high: float

    def __neg__(self) -> Difference:
        """The same comparison the other way round."""
        return Difference(self.n, -self.mean, -self.high, -self.low)

    def own_floor(self, dof: int) -> float:
        """The 95 % bound on the mean by the spread of the differences themselves, known from ``dof`` degrees."""
        if self.n < 2:
            return 0.0
        return t_quantile(dof) * (self.high - self.mean) / t_quantile(self.n - 1)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero; False for one seed."""
        return self.low > 0 or self.high < 0


def paired_difference(a: pd.Series, b: pd.Series) -> Difference | None:
    """Return the mean of ``a - b`` over the seeds (index labels) that both have, with its t-interval.

    ``None`` when they share no seed with a value.
    """
    differences = (a - b).dropna().to_numpy(dtype="float64")
    n = len(differences)
    if n == 0:
        return None
    mean = float(differences.mean())
    if n == 1:
        return Difference(1, mean, math.nan, math.nan)
    half = t_quantile(n - 1) * float(differences.std(ddof=1)) / math.sqrt(n)
    return Difference(n, mean, mean - half, mean + half)


@dataclass(frozen=True)
class Noise:
    """The residual standard deviation between equal arms, its degrees of freedom and its sources.

    ``unstable`` arms were left out. ``least`` is a difference between equal arms that no number of seeds takes away.
    """

    sd: float
    dof: int
    arms: int
    seeds: int
    unstable: int = 0
    least: float = 0.0

    def floor(self, n: int) -> float:
        """The 95 % bound on the mean difference over ``n`` seeds between two arms that are equal."""
        return max(self.least, t_quantile(self.dof) * self.sd * math.sqrt(2 / n))

    def seeds_for(self, difference: float) -> int | None:
        """Return how many seeds bring the floor down to ``difference`` with the same arms; ``None`` above 1,000."""
        for n in range(2, 1001):
            dof = max(1, round(self.dof * (n - 1) / (self.seeds - 1)))
            more = dataclasses.replace(self, dof=dof, seeds=n)
            if more.floor(n) <= difference:
                return n
        return None


def noise(groups: Iterable[pd.DataFrame]) -> Noise | None:
    """Return the noise pooled over ``groups``, each a table of losses (a row per arm, a column per seed).

    Missing entries are NaN. Rows that repeat another row exactly (E0M7 repeats E1M6) are one arm.
    ``None`` when no group leaves a degree of freedom, such as with one seed or one arm.
    """
    squares, dof, arms, seeds = 0.0, 0, 0, 0
    tables = [group.dropna(how="all").drop_duplicates().to_numpy(dtype="float64") for group in groups]
    spreads = [_spreads(table) for table in tables]
    known = np.concatenate([[], *spreads])
    limit = UNSTABLE * np.median(known[np.isfinite(known)]) if np.isfinite(known).any() else math.inf
    for table, spread in zip(tables, spreads, strict=True):
        table = table[~(spread > limit)]
        row, column = np.nonzero(np.isfinite(table))
        design = np.zeros((len(row), sum(table.shape)))
        design[np.arange(len(row)), row] = 1
        design[np.arange(len(row)), table.shape[0] + column] = 1
        losses = table[row, column]
        coefficients, _, rank, _ = np.linalg.lstsq(design, losses, rcond=None)
        free = len(losses) - int(rank)
        if free <= 0:
            continue
        squares += float(((losses - design @ coefficients) ** 2).sum())
        dof += free
        arms += table.shape[0]
        seeds = max(seeds, table.shape[1])
    if dof == 0:
        return None
    return Noise(math.sqrt(squares / dof), dof, arms, seeds, unstable=int((known > limit).sum()))


def _spreads(table: np.ndarray) -> np.ndarray:
    """Return for each row the median standard deviation of its differences to the others; NaN without two in pairs."""
    differences = table[:, None, :] - table[None, :, :]
    count = np.isfinite(differences).sum(axis=2)
    np.fill_diagonal(count, 0)
    centre = np.nansum(differences, axis=2) / np.maximum(count, 1)
    squares = np.nansum((differences - centre[:, :, None]) ** 2, axis=2)
    deviations = np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)
    return np.array([np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else math.nan for row in deviations])


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
