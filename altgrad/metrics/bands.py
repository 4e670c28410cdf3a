"""The band of healthy runs: what a run recorded, and where the runs like it are, metric by metric, tensor by tensor.

A run's live measurements are held against those of healthy runs, its *peers*, at every step that they have in common.
Values are compared in binades (log2; precision in dB over 6.02), so one floor serves all. The middle of a band is the
peers' median at that step. Its spread is pooled: over the steps of a tensor, and half of it over all layers, since a
few runs know little of one tensor. With fewer than `LEAST_PEERS` there is no band.

It takes data frames and needs no torch, so diagnoses and reports can both ask it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from altgrad.metrics.table import METRICS

LEAST_PEERS = 3
FLOOR = 1 / 16  # binades: no spread of a tensor is taken for smaller ...
LOSS_FLOOR = 1 / 64  # ... nor one of the loss: 1.1 %
KEY = ["layer", "role", "metric"]
LOSSES = ["train_loss", "val_loss"]
LEAST_SHARE = 2.0**-10  # a share is compared as if so much were added, or 0 would be infinitely far from anything
PER_BINADE = 20 * np.log10(2)  # dB
# The first has no sign to lose, the second needs no band; the third counts what an entropy, which has one, is below.
OMITTED = {"mean", "nonfinite", "attention_low_heads"}


@dataclass(frozen=True)
class Trace:
    """What a run recorded: ``monitors`` (step, layer, role, metric, value), ``history`` (step, train_loss, val_loss).

    ``diverged`` is the step at which the run was found to have diverged, if it was; ``nonfinite`` the first tensor of
    that step that was not finite, as ``"blocks.0.mlp.up grad"``, or "".
    """

    monitors: pd.DataFrame
    history: pd.DataFrame
    diverged: int | None = None
    nonfinite: str = ""

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """The measurements, (layer, role, metric) x step, in binades: infinity where what was recorded is not finite,
        NaN where nothing was."""
        codes, metrics = pd.factorize(self.monitors["metric"])
        value = self.monitors["value"].to_numpy(dtype="float64")
        kept = np.zeros(len(value), dtype=bool)
        found = np.full(len(value), np.nan)
        for code, metric in enumerate(metrics):
            if metric in METRICS and metric not in OMITTED:
                own = codes == code
                kept |= own
                found[own] = to_binades(metric, value[own])
        rows = self.monitors.assign(value=np.where(np.isfinite(found), found, np.inf))[kept]
        return rows.set_index([*KEY, "step"])["value"].unstack("step", sort=False).sort_index(axis=1)

    @cached_property
    def losses(self) -> pd.DataFrame:
        return np.log2(self.history.set_index("step")[LOSSES].astype("float64").T)


@dataclass(frozen=True)
class Healthy:
    """The finite values of several runs, in binades, of which one may lack keys or steps that another has.

    All but ``index`` (keys) and ``columns`` (steps) are (keys, steps): how many runs have a value, their median, the
    summed squares of their distances from it, and their extremes; NaN where no run has one.
    """

    index: pd.Index
    columns: pd.Index
    count: np.ndarray
    middle: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @classmethod
    def of(cls, frames: Sequence[pd.DataFrame]) -> Healthy:
        """Return what the ``frames`` of runs, keys x steps, have between them; one at least."""
        index, columns = _union(frame.index for frame in frames), _union(frame.columns for frame in frames)
        stack = np.stack([frame.reindex(index=index, columns=columns).to_numpy(dtype="float64") for frame in frames])
        stack[~np.isfinite(stack)] = np.nan
        stack.sort(axis=0)  # NaN comes last
        count = np.isfinite(stack).sum(axis=0)

        def at(place: np.ndarray) -> np.ndarray:
            return np.take_along_axis(stack, np.maximum(place, 0)[None], axis=0)[0]

        middle = (at((count - 1) // 2) + at(count // 2)) / 2
        squares = np.nansum((stack - middle) ** 2, axis=0)
        return cls(index, columns, count, middle, squares, stack[0], at(count - 1))

    def like(self, values: pd.DataFrame) -> Healthy:
        """Return the same for the keys and steps of ``values``."""
        rows, columns = self.index.get_indexer(values.index), self.columns.get_indexer(values.columns)
        unknown = (rows < 0)[:, None] | (columns < 0)

        def of(numbers: np.ndarray, otherwise: float) -> np.ndarray:
            return np.where(unknown, otherwise, numbers[np.ix_(rows, columns)])

        return Healthy(
            values.index, values.columns, of(self.count, 0), of(self.middle, np.nan), of(self.squares, 0),
            of(self.low, np.nan), of(self.high, np.nan),
        )  # fmt: skip


class Peers(tuple[Trace, ...]):
    """Healthy runs. What bands need of them is computed once, however many runs are held against them."""

    @cached_property
    def tensors(self) -> Healthy:
        return Healthy.of([peer.tensors for peer in self])

    @cached_property
    def losses(self) -> Healthy:
        return Healthy.of([peer.losses for peer in self])


@dataclass(frozen=True)
class Bands:
    """A run's values (keys, steps), in binades, and where its peers' are: ``middle`` and ``spread``, NaN where unknown.

    ``low`` and ``high`` are the peers' extremes.
    """

    values: pd.DataFrame
    middle: np.ndarray
    spread: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def beyond(self) -> np.ndarray:
        """How far out each value is, in spreads, with its sign; 0 where there is no value or no band."""
        known = np.isfinite(self.middle)
        far = (self.values.to_numpy() - self.middle) / self.spread
        return np.where(known & ~np.isnan(far), far, 0.0)


def tensor_bands(run: Trace, peers: Peers) -> Bands:
    """Return the bands of every tensor and metric that ``run`` has, at its steps."""
    values = run.tensors
    groups = values.index.droplevel("layer")
    return _bands(values, peers.tensors, groups, FLOOR)


def loss_bands(run: Trace, peers: Peers) -> Bands:
    """Return the bands of the losses, keyed by their names."""
    values = run.losses
    return _bands(values, peers.losses, values.index, LOSS_FLOOR)


def to_binades(metric: str, value: np.ndarray) -> np.ndarray:
    """Return values of a metric on a scale whose unit is a factor of two."""
    return _scale(metric)[0](value)


def from_binades(metric: str, value: np.ndarray) -> np.ndarray:
    """Undo `to_binades`."""
    return _scale(metric)[1](value)


Way = Callable[[np.ndarray], np.ndarray]


def _scale(metric: str) -> tuple[Way, Way]:
    unit = METRICS[metric].unit if metric in METRICS else "1"
    if unit == "dB":
        return lambda v: v / PER_BINADE, lambda y: y * PER_BINADE
    if metric == "kurtosis":  # plus 3 it is a ratio of moments
        return lambda v: np.log2(v + 3), lambda y: 2**y - 3
    if unit == "cosine":
        return lambda v: np.log2(1 - v + LEAST_SHARE), lambda y: 1 - 2**y + LEAST_SHARE
    if unit.startswith("share"):
        return lambda v: np.log2(v + LEAST_SHARE), lambda y: 2**y - LEAST_SHARE
    return lambda v: np.log2(np.maximum(np.abs(v), np.finfo(float).tiny)), lambda y: 2.0**y


def _union(indexes: Iterable[pd.Index]) -> pd.Index:
    return functools.reduce(lambda one, other: one.union(other, sort=False), indexes)


def _bands(values: pd.DataFrame, healthy: Healthy, groups: pd.Index, floor: float) -> Bands:
    """Return the bands of ``values``; half of a spread is what the keys of the same group have in common."""
    peers = healthy.like(values)
    freedom = np.maximum(peers.count - 1, 0)
    own = peers.squares.sum(axis=1) / np.maximum(freedom.sum(axis=1), 1)
    common = pd.Series(own).groupby(groups.to_numpy()).transform("median").to_numpy()
    spread = np.sqrt(np.maximum((own + common) / 2, floor**2))[:, None] * np.sqrt(1 + 1 / np.maximum(peers.count, 1))
    middle = np.where(peers.count >= LEAST_PEERS, peers.middle, np.nan)
    return Bands(values, middle, spread, peers.low, peers.high)
