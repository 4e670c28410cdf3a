"""Losses paired by seed: contrasts of runs, Student's paired t-test of each, and the rule by which they are judged.

A seed fixes the initial weights and the order of the batches for every optimizer. Runs are therefore compared seed by
seed, and the effect of a seed on both cancels. Each contrast has its own standard deviation, so intervals and p-values
are those of ``scipy.stats.ttest_rel``; STATISTICS.md says why.

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

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

import numpy as np
import pandas as pd
from scipy.special import nctdtrinc, stdtr, stdtrit

CONFIDENCE = 0.95
RUN = ["format", "optimizer", "lr_scale"]  # what names a run of a grid
LEVEL = 0.05
SEEDS = 5  # the fewest paired seeds of a test
#: Nats per token: the spread between seeds of a default run, and the gain from 1 % more tokens (reports/study).
SMALLEST_EFFECT = 0.005
SEEN = 0.9  # how often the same seeds would find an effect of the size ``Result.visible``

LOWER, HIGHER, NO_EFFECT, INCONCLUSIVE = "lower", "higher", "no effect", "inconclusive"
TOO_FEW, TUNED_HERE, IDENTICAL = f"n < {SEEDS}, no test", "rates chosen on these seeds, no test", "identical"
NO_SPREAD = "zero spread, no test"  # the same difference in every seed
UNTESTED, NONE_SEEN = (TOO_FEW, TUNED_HERE, NO_SPREAD), (NO_EFFECT, IDENTICAL)

Run = tuple[str, str, float]
Contrast = Mapping[Run, int]  # by run, the sign of its loss
AnyRun = TypeVar("AnyRun", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)


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
    def of(cls, losses: Iterable[tuple[AnyRun, int, float]], seeds: Iterable[int]) -> Self:
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
    def significant(self) -> bool:
        """Whether the loss is significantly lower or higher."""
        return self.outcome in (LOWER, HIGHER)


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
