"""What tells beforehand which format costs most: the tensors' SQNR, or the loss change that rounding errors predict.

Both are read off the baseline's finished cells, and held against what formats cost when trained so, and after training,
by Spearman's rank correlation over formats: 1 for a predictor that has their order right. For its 95 % interval seeds
are resampled (prediction and cost of a seed together), which tells of these formats; or formats, which tells of others
like them. The p-value is of all orders of up to eight formats, and of orders drawn for more.
"""

from __future__ import annotations

from itertools import permutations
from typing import NamedTuple

import numpy as np
import pandas as pd

from altgrad.config.recipe import HEADS
from altgrad.formats import get_format

RESAMPLES, SEED = 2000, 0
MOST_EXACT = 8  # formats, 40320 orders
DRAWN = 100_000  # orders of more formats
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
    low: float  # of the 95 % interval; NaN where one seed is resampled
    high: float
    p_value: float  # of rho or more, if the order were chance


def agreement(predicted: np.ndarray, cost: np.ndarray, over: str = "seeds") -> Agreement:
    """Return the agreement of two arrays (seeds, formats), of their means over seeds.

    ``over`` says what is resampled, ``seeds`` or ``formats``. Raises ``ValueError`` for fewer than three formats.
    """
    _require(predicted, cost)
    rho = _spearman(predicted.mean(0), cost.mean(0))
    low, high = _interval(_resampled(predicted, cost, over))
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


def difference(one: np.ndarray, other: np.ndarray, cost: np.ndarray, over: str = "seeds") -> Difference:
    """Return how much better ``one`` has the order of ``cost`` than ``other``; arrays (seeds, formats)."""
    _require(one, cost)
    value = _spearman(one.mean(0), cost.mean(0)) - _spearman(other.mean(0), cost.mean(0))
    return Difference(float(value), *_interval(_resampled(one, cost, over) - _resampled(other, cost, over)))


def over_formats(predicted: pd.DataFrame, cost: pd.Series) -> pd.DataFrame:
    """Return how well each predictor has the order of ``cost``, over all formats and within 8 bits.

    Args:
        predicted: as `predictions` returns it.
        cost: nats per token, a value for each of its formats.

    Returns:
        A row for each predictor and each difference to ``sqnr``: ``formats``, their ``count``, ``predictor``, rank
        correlation ``rho`` with ``low`` and ``high`` of its 95 % interval, formats resampled, and ``p_value``.
    """
    rows = []
    for label, names in (("all", list(cost.index)), ("8 bits", [n for n in cost.index if get_format(n).bits == 8])):
        if len(names) < 3:
            continue
        true = cost[names].to_numpy()[None]
        by = {name: predicted.loc[names, name].to_numpy()[None] for name in PREDICTORS}
        rows += [(label, len(names), name, *agreement(by[name], true, "formats")) for name in PREDICTORS]
        for name in PREDICTORS[1:]:
            found = difference(by[name], by["sqnr"], true, "formats")
            rows.append((label, len(names), f"{name} - sqnr", *found, np.nan))
    return pd.DataFrame(rows, columns=["formats", "count", "predictor", *Agreement._fields]).round(6)


def _require(predicted: np.ndarray, cost: np.ndarray) -> None:
    if predicted.shape != cost.shape or cost.ndim != 2:
        raise ValueError(f"expected two arrays (seeds, formats) alike, got {predicted.shape} and {cost.shape}")
    if cost.shape[1] < 3:
        raise ValueError(f"an order of {cost.shape[1]} formats says nothing; three at least are needed")


def _resampled(predicted: np.ndarray, cost: np.ndarray, over: str) -> np.ndarray:
    """Return the correlation of each resample, the same ones for every predictor; none of one seed."""
    seeds, formats = cost.shape
    draw = np.random.default_rng(SEED)
    if over == "formats":
        drawn = draw.integers(0, formats, (RESAMPLES, formats))
        return _spearman(predicted.mean(0)[drawn], cost.mean(0)[drawn])
    if seeds < 2:
        return np.empty(0)
    drawn = draw.integers(0, seeds, (RESAMPLES, seeds))
    return _spearman(predicted[drawn].mean(1), cost[drawn].mean(1))


def _interval(values: np.ndarray) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def _ranks(x: np.ndarray) -> np.ndarray:
    """Return the ranks along the last dimension, from 1, of equal values their mean."""
    from scipy.stats import rankdata  # half a second, which no cell's diagnosis needs

    return rankdata(x, axis=-1)


def _spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return Spearman's correlation along the last dimension; NaN where all of one are alike."""
    a, b = (_ranks(x) - (x.shape[-1] + 1) / 2 for x in (a, b))
    norm = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.divide((a * b).sum(-1), norm, out=np.full_like(norm, np.nan), where=norm > 0)


def _p_value(a: np.ndarray, b: np.ndarray) -> float:
    a, b = _ranks(a), _ranks(b)
    if len(a) > MOST_EXACT:
        orders = np.random.default_rng(SEED).permuted(np.tile(a, (DRAWN, 1)), axis=1)
        return float(((orders @ b >= a @ b - 1e-9).sum() + 1) / (DRAWN + 1))  # the order itself is one of them
    products = np.array(list(permutations(a))) @ b
    return float((products >= a @ b - 1e-9).mean())
