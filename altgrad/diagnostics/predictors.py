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
    low, high = _interval([_spearman(predicted[i].mean(0), cost[i].mean(0)) for i in _resamples(len(cost))])
    return Agreement(rho, low, high, _p_value(predicted.mean(0), cost.mean(0)))


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

    def value(i: np.ndarray) -> float:
        return _spearman(one[i].mean(0), cost[i].mean(0)) - _spearman(other[i].mean(0), cost[i].mean(0))

    low, high = _interval([value(i) for i in _resamples(len(cost))])
    return Difference(value(np.arange(len(cost))), low, high)


def _require(predicted: np.ndarray, cost: np.ndarray) -> None:
    if predicted.shape != cost.shape or cost.ndim != 2:
        raise ValueError(f"expected two arrays (seeds, formats) alike, got {predicted.shape} and {cost.shape}")
    if cost.shape[1] < 3:
        raise ValueError(f"an order of {cost.shape[1]} formats says nothing; three at least are needed")


def _resamples(seeds: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, seeds, (RESAMPLES, seeds)) if seeds > 1 else np.empty((0, 1), int)


def _interval(values: list[float]) -> tuple[float, float]:
    if not values:
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    """NaN where all of one are alike."""
    a, b = (rankdata(x) - (len(x) + 1) / 2 for x in (a, b))
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm else float("nan")


def _p_value(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) > MOST_EXACT:
        return float("nan")
    a, b = rankdata(a), rankdata(b)
    products = np.array(list(permutations(a))) @ b
    return float((products >= a @ b - 1e-9).mean())
