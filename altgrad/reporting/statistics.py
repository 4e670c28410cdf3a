"""Losses paired by seed: contrasts of runs, and for each its mean, interval and p-value by Student's paired t-test.

A seed fixes the initial weights and the order of the batches for every optimizer. Runs are therefore compared seed by
seed, and the effect of a seed on both cancels. Each contrast has its own standard deviation, so intervals and p-values
are those of ``scipy.stats.ttest_rel``; STATISTICS.md says why. `altgrad.reporting.decision_rule` adjusts the p-values.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
RUN = ["format", "optimizer", "lr_scale"]  # what names a run of a grid

Run = tuple[str, str, float]
Contrast = Mapping[Run, int]  # by run, the sign of its loss
AnyRun = TypeVar("AnyRun", bound=Hashable)


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
        """Whether both losses are equal in every seed, apart from rounding."""
        return self.mean == 0 and not self.sd > 0

    @property
    def error(self) -> float:
        """The standard error of the mean, with ``n - 1`` degrees of freedom; NaN for one seed."""
        return self.sd / math.sqrt(self.n)

    @property
    def half_width(self) -> float:
        """Half of the unadjusted 95 % interval of the mean; NaN for one seed or a standard deviation of zero."""
        return t_quantile(self.n - 1) * self.error if self.sd > 0 else math.nan

    def p_value(self, least: float = 0.0) -> float:
        """Return the unadjusted two-sided p-value against a true mean within ±``least``; NaN where `half_width` is."""
        if not self.sd > 0:
            return math.nan
        beyond = [(side * least - abs(self.mean)) / self.error for side in (1, -1)]
        return float(min(1.0, sum(stdtr(self.n - 1, beyond))))


def summarised(differences: np.ndarray, losses: float = 0.0) -> Difference | None:
    """Return the mean and standard deviation of paired differences; ``None`` if no seed has one.

    Args:
        differences: one per seed, NaN where a run has no loss.
        losses: the sum of the magnitudes that were subtracted. A standard deviation within their rounding error counts
            as zero, and so does a mean: 3.51 - 3.5 and 3.71 - 3.7 differ in the last digits alone.
    """
    known = differences[np.isfinite(differences)]
    if len(known) == 0:
        return None
    mean, sd = float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else math.nan
    rounding = 2 * np.finfo(np.float64).eps * losses
    return Difference(len(known), 0.0 if sd <= rounding >= abs(mean) else mean, 0.0 if sd <= rounding else sd)


def interval(differences: np.ndarray | pd.Series) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 95 % interval; NaN where `Difference` has no interval."""
    difference = summarised(np.asarray(differences))
    if difference is None:
        return math.nan, math.nan, math.nan
    return difference.mean, difference.mean - difference.half_width, difference.mean + difference.half_width


def outlier(values: np.ndarray) -> tuple[int, float]:
    """Return the place of the value farthest from the mean, and the p-value of Grubbs' two-sided test for it.

    ``values``: float64, (n,); NaN is ignored. p is 1 for fewer than three values, and if the other values are equal.
    The test (F. E. Grubbs, "Sample criteria for testing outlying observations", Annals of Mathematical Statistics 21,
    1950) is computed as the t of the value minus the mean of the others.
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


@dataclass(frozen=True)
class PairedLosses(Generic[AnyRun]):
    """The compared number, such as the final validation loss, by run and seed.

    ``losses``: float64, (rows, seeds), NaN where a run did not complete. ``place`` is the row of each run. Runs that
    are equal to the last bit, as those of E0M7 and E1M6 are, share a row.
    """

    place: dict[AnyRun, int]
    losses: np.ndarray

    @classmethod
    def of(cls, losses: Iterable[tuple[AnyRun, int, float]], seeds: Iterable[int]) -> PairedLosses[AnyRun]:
        """Return the table of ``losses``, given as run, seed and loss; NaN for a run that did not complete."""
        positions = {seed: i for i, seed in enumerate(seeds)}
        rows: dict[AnyRun, np.ndarray] = {}
        for run, seed, loss in losses:
            rows.setdefault(run, np.full(len(positions), np.nan))[positions[seed]] = loss
        distinct: dict[bytes, int] = {}
        place = {run: distinct.setdefault(row.tobytes(), len(distinct)) for run, row in rows.items()}
        return cls(place, np.array([np.frombuffer(row) for row in distinct]).reshape(len(distinct), len(positions)))

    def of_run(self, run: AnyRun) -> pd.Series:
        """Return the losses of ``run``, one per seed, indexed by the seed's position."""
        return pd.Series(self.losses[self.place[run]])

    def row(self, contrast: Mapping[AnyRun, float]) -> np.ndarray:
        """Return the weight in ``contrast`` of each row of ``losses``, shape (rows,)."""
        weights = np.zeros(len(self.losses))
        for run, sign in contrast.items():
            weights[self.place[run]] += sign
        return weights

    def by_seed(self, contrast: Mapping[AnyRun, float]) -> np.ndarray:
        """Return the value of ``contrast`` for each seed; NaN if one of its runs has no loss or does not exist."""
        if any(run not in self.place for run in contrast):
            return np.full(self.losses.shape[1], np.nan)
        return sum((weight * self.losses[self.place[run]] for run, weight in contrast.items()), np.zeros(1))

    def difference(self, contrast: Mapping[AnyRun, float]) -> Difference | None:
        """Return the `Difference` of ``contrast`` over the seeds that all its runs completed; ``None`` without any."""
        differences = self.by_seed(contrast)
        if not np.isfinite(differences).any():
            return None
        sizes = (abs(weight) * np.nanmax(np.abs(self.losses[self.place[run]])) for run, weight in contrast.items())
        return summarised(differences, float(sum(sizes)))

    def completed(self, run: AnyRun) -> int:
        """Return how many seeds of ``run`` completed."""
        return int(np.isfinite(self.losses[self.place[run]]).sum())

    def best(self, candidates: Sequence[AnyRun], *, higher_is_better: bool = False) -> AnyRun:
        """Return the candidate with the most completed seeds; of several, the one with the best mean over shared seeds.

        If they share no seed, the first one is returned: of ascending learning rates the smallest is the most stable.
        """
        most = max(self.completed(run) for run in candidates)
        left = [run for run in candidates if self.completed(run) == most]
        table = np.array([self.losses[self.place[run]] for run in left])
        shared = np.isfinite(table).all(axis=0)
        if not shared.any():
            return left[0]
        means = table[:, shared].mean(axis=1)
        return left[int(means.argmax() if higher_is_better else means.argmin())]
