"""What tells beforehand which format costs most: the tensors' SQNR, or the loss change that rounding errors predict.

Both are read off the baseline's finished cells, and held against what formats cost when trained so, and after training,
by Spearman's rank correlation over formats: 1 for a predictor that has their order right. Seeds are resampled for its
95 % interval (prediction and cost of a seed together); the p-value is exact, over all orders of the formats.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from altgrad.config.recipe import HEADS

RESAMPLES, SEED = 2000, 0
MOST_EXACT = 8  # formats, 40320 orders
PREDICTORS = ("sqnr", "fisher", "taylor")


def predictions(table: pd.DataFrame, granularity: str = "tensor") -> pd.DataFrame:
    """Return for each format (rows) what each of `PREDICTORS` (columns) says: the higher, the more it should cost.

    Of a table of `what_if`, over what training in a format rounds in the forward pass: weights, and inputs but of a
    head. ``sqnr`` is the mean of -SQNR in dB, ``fisher`` the sum of the loss changes of second order, ``taylor`` that
    of first and second order.
    """
    rows = table[(table.granularity == granularity) & (table.rounding == "nearest-even")]
    rows = rows[rows.role.eq("weight") | (rows.role.eq("input") & ~rows.layer.isin(HEADS))]
    by = rows.groupby("format", sort=False)
    second, first = by.loss_second.sum(), by.loss_first.sum()
    return pd.DataFrame({"sqnr": -by.sqnr_db.mean(), "fisher": second, "taylor": first + second})


class Agreement(NamedTuple):
    """How well a predictor has the order of the formats' costs."""

    rho: float
    low: float  # of the 95 % interval; NaN for one seed
    high: float
    p_value: float  # of rho or more, if the order were chance


def agreement(predicted: np.ndarray, cost: np.ndarray) -> Agreement:
    """Return the agreement of two arrays (seeds, formats), of their means over seeds.

    The p-value is NaN for more than `MOST_EXACT` formats. Raises ``ValueError`` for fewer than three.
    """
    _require(predicted, cost)
    rho = _spearman(predicted.mean(0), cost.mean(0))
    low, high = _interval(_resampled(predicted, cost))
    return Agreement(float(rho), low, high, _p_value(predicted.mean(0), cost.mean(0)))


class Difference(NamedTuple):
    """A predictor's rank correlation minus another's."""

    value: float
    low: float
    high: float

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def difference(one: np.ndarray, other: np.ndarray, cost: np.ndarray) -> Difference:
    """Return how much better ``one`` has the order of ``cost`` than ``other``; arrays (seeds, formats)."""
    _require(one, cost)

    value = _spearman(one.mean(0), cost.mean(0)) - _spearman(other.mean(0), cost.mean(0))
    return Difference(float(value), *_interval(_resampled(one, cost) - _resampled(other, cost)))


def _require(predicted: np.ndarray, cost: np.ndarray) -> None:
    if predicted.shape != cost.shape or cost.ndim != 2:
        raise ValueError(f"expected two arrays (seeds, formats) alike, got {predicted.shape} and {cost.shape}")
    if cost.shape[1] < 3:
        raise ValueError(f"an order of {cost.shape[1]} formats says nothing; three at least are needed")


def _resampled(predicted: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return the correlation of each resample of the seeds, the same ones for every predictor; none of one seed."""
    seeds = len(cost)
    if seeds < 2:
        return np.empty(0)
    drawn = np.random.default_rng(SEED).integers(0, seeds, (RESAMPLES, seeds))
    return _spearman(predicted[drawn].mean(1), cost[drawn].mean(1))


def _interval(values: np.ndarray) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def _spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation along the last dimension; NaN where all of one are alike."""
    a, b = (rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2 for x in (a, b))
    norm = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.divide((a * b).sum(-1), norm, out=np.full_like(norm, np.nan), where=norm > 0)


def _p_value(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) > MOST_EXACT:
        return float("nan")
    a, b = rankdata(a), rankdata(b)
    products = np.array(list(permutations(a))) @ b
    return float((products >= a @ b - 1e-9).mean())
