"""Which tensor left the band of healthy runs first, in a run that diverged or ended worse: the first anomalous tensor.

**Bands.** A run's live measurements are compared with those of healthy runs, its *peers*: each metric of each tensor at
every step that they share. Values are compared in binades (log2; dB over 6.02), so one floor serves all.
The middle of a band is the peers' median at that step. Its spread is pooled: over the steps of a tensor, and half of it
over all layers, since a few runs say little about one tensor. With fewer than `LEAST_PEERS` peers there is no band, and
the limits of the metrics' rows take its place.

**Excursions.** An excursion is a value more than `THRESHOLD` spreads from the middle of its band, in one pass and in
the next one, if there is one. The first anomaly is the earliest excursion that is no later than the loss's: a tensor
that leaves its band after the loss rose by `LOSS_THRESHOLD` spreads is a consequence. An update is a consequence of a
tensor that leaves its band at the same step, since that step's gradients make the update. Of several tensors in one
pass the farthest from its band is named. Of equally far tensors, such as ones with NaN, weights come first, then
tensors in the order in which they are computed.

The thresholds were chosen on injected faults; reports/first_anomaly has the results on other faults. Updates have a
threshold of their own: they vary more from step to step than from run to run, and spreads are pooled over steps.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import pandas as pd

from altgrad.metrics.table import METRICS

LEAST_PEERS = 3
FLOOR = 1 / 16  # binades: the least spread of a tensor ...
LOSS_FLOOR = 1 / 64  # ... and of the loss: 1.1 %
THRESHOLD = 12.0  # spreads, of tensors
UPDATE_THRESHOLD = 8.0  # of updates
LOSS_THRESHOLD = 4.0  # of the loss: set by hand after a first look at injected faults, chosen on no score
KEY = ["layer", "role", "metric"]
LOSSES = ["train_loss", "val_loss"]
LEAST_SHARE = 2.0**-10  # added to a share before its logarithm, which would be infinite at 0
PER_BINADE = 20 * np.log10(2)  # dB
# The logarithm would lose the sign of a mean, nonfinite needs no band, and attention_entropy covers the third.
OMITTED = {"mean", "nonfinite", "attention_low_heads"}
UPDATE = "update"
FORWARD, BACKWARD = ("input", "output"), ("grad", "weight_grad", UPDATE)  # the roles of a pass, in order

Way = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Trace:
    """What a run recorded: ``monitors`` (step, layer, role, metric, value), ``history`` (step, train_loss, val_loss).

    ``diverged`` is the step at which the run was found to have diverged, ``None`` if it did not. ``nonfinite`` is the
    first tensor of that step that was not finite, such as ``"blocks.0.mlp.up grad"``, or "".
    """

    monitors: pd.DataFrame
    history: pd.DataFrame
    diverged: int | None = None
    nonfinite: str = ""

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """The measurements in binades: a row for each (layer, role, metric), a column for each step.

        Infinity stands for a recorded value that is not finite, NaN for one that was not recorded.
        """
        rows = self.monitors[self.monitors["metric"].isin(METRICS.keys() - OMITTED)]
        values = rows["value"].to_numpy(dtype="float64")
        binades = np.empty(len(values))
        for metric, places in rows.groupby("metric", sort=False).indices.items():
            binades[places] = to_binades(str(metric), values[places])
        rows = rows.assign(value=np.where(np.isfinite(binades), binades, np.inf))
        return rows.set_index([*KEY, "step"])["value"].unstack("step", sort=False).sort_index(axis=1)

    @cached_property
    def losses(self) -> pd.DataFrame:
        return np.log2(self.history.set_index("step")[LOSSES].astype("float64").T)


class Healthy(NamedTuple):
    """Statistics of the finite values of several runs, in binades: frames (keys x steps).

    ``runs`` is the number of runs with a value, ``middle`` their median, ``squares`` the summed squared distances from
    the median, ``low`` and ``high`` the extremes. All but ``runs`` and ``squares`` are NaN where no run has a value.
    """

    runs: pd.DataFrame
    middle: pd.DataFrame
    squares: pd.DataFrame
    low: pd.DataFrame
    high: pd.DataFrame

    @classmethod
    def of(cls, frames: Sequence[pd.DataFrame]) -> Self:
        """Return the statistics over ``frames``, one for each run. A run may lack keys or steps that another has."""
        index, columns = _union(frame.index for frame in frames), _union(frame.columns for frame in frames)
        stack = np.stack([frame.reindex(index=index, columns=columns).to_numpy(dtype="float64") for frame in frames])
        stack[~np.isfinite(stack)] = np.nan
        stack.sort(axis=0)  # NaN comes last
        count = np.isfinite(stack).sum(axis=0)

        def at(place: np.ndarray) -> np.ndarray:
            return np.take_along_axis(stack, np.maximum(place, 0)[None], axis=0)[0]

        middle = (at((count - 1) // 2) + at(count // 2)) / 2
        squares = np.nansum((stack - middle) ** 2, axis=0)
        return cls(*(pd.DataFrame(t, index, columns) for t in (count, middle, squares, stack[0], at(count - 1))))

    def like(self, values: pd.DataFrame) -> Self:
        """Return the statistics at the keys and steps of ``values``; no run has those that are not here."""
        found = type(self)(*(frame.reindex(index=values.index, columns=values.columns) for frame in self))
        return found._replace(runs=found.runs.fillna(0), squares=found.squares.fillna(0))


class Peers(tuple[Trace, ...]):
    """Healthy runs. Their statistics are computed once, for any number of comparisons."""

    @cached_property
    def tensors(self) -> Healthy:
        return Healthy.of([peer.tensors for peer in self])

    @cached_property
    def losses(self) -> Healthy:
        return Healthy.of([peer.losses for peer in self])


@dataclass(frozen=True)
class Bands:
    """A run's ``values`` (keys, steps) in binades, and the band that its peers make at each of them.

    The band has a ``middle``, a ``spread`` and the peers' extremes ``low`` and ``high``. ``middle`` is NaN where fewer
    than `LEAST_PEERS` peers have a value.
    """

    values: pd.DataFrame
    middle: np.ndarray
    spread: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def beyond(self) -> np.ndarray:
        """The distance of each value from ``middle``, in spreads, with its sign; 0 without a value or a band."""
        known = np.isfinite(self.middle)
        far = (self.values.to_numpy() - self.middle) / self.spread
        return np.where(known & ~np.isnan(far), far, 0.0)


def tensor_bands(run: Trace, peers: Peers) -> Bands:
    """Return the bands of every tensor and metric of ``run`` at each step that it recorded."""
    return _bands(run.tensors, peers.tensors, run.tensors.index.droplevel("layer"), FLOOR)


def loss_bands(run: Trace, peers: Peers) -> Bands:
    """Return the bands of the losses of ``run``; the keys are ``train_loss`` and ``val_loss``."""
    return _bands(run.losses, peers.losses, run.losses.index, LOSS_FLOOR)


def to_binades(metric: str, value: np.ndarray) -> np.ndarray:
    """Return ``value``, in the unit of ``metric``, in binades: a difference of 1 is a factor of two."""
    return _scale(metric)[0](value)


def from_binades(metric: str, value: np.ndarray) -> np.ndarray:
    """Return ``value``, in binades, in the unit of ``metric``: the inverse of `to_binades`."""
    return _scale(metric)[1](value)


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
    """Return the bands of ``values``. ``groups`` names each key's group; half of a key's variance is its group's."""
    peers = healthy.like(values)
    count = peers.runs.to_numpy()
    freedom = np.maximum(count - 1, 0)
    own = peers.squares.to_numpy().sum(axis=1) / np.maximum(freedom.sum(axis=1), 1)
    common = pd.Series(own).groupby(groups.to_numpy()).transform("median").to_numpy()
    spread = np.sqrt(np.maximum((own + common) / 2, floor**2))[:, None] * np.sqrt(1 + 1 / np.maximum(count, 1))
    middle = np.where(count >= LEAST_PEERS, peers.middle, np.nan)
    return Bands(values, middle, spread, peers.low.to_numpy(), peers.high.to_numpy())


@dataclass(frozen=True)
class Excursion:
    """A value outside its band, ``beyond`` spreads from the middle.

    ``low`` and ``high`` are the smallest and largest of the peers' values at that step, NaN without peers.
    """

    layer: str
    role: str
    metric: str
    step: int
    value: float
    low: float
    high: float
    beyond: float


@dataclass(frozen=True)
class FirstAnomaly:
    """The first excursion of a run: ``excursion`` is ``None`` if no tensor left its band before the loss did.

    ``loss_step`` is the step at which the loss left its band or the run diverged, ``None`` if neither happened.
    ``peers`` is the number of healthy runs that made the bands, 0 where limits took their place.
    """

    excursion: Excursion | None
    loss_step: int | None
    peers: int

    @property
    def lead(self) -> int | None:
        if self.excursion is None or self.loss_step is None:
            return None
        return self.loss_step - self.excursion.step


def first_anomaly(
    run: Trace, peers: Peers, threshold: float = THRESHOLD, update_threshold: float = UPDATE_THRESHOLD
) -> FirstAnomaly:
    """Return the first anomaly of ``run``, as the module defines it. ``peers`` are healthy runs other than ``run``."""
    enough = len(peers) >= LEAST_PEERS
    loss_step = _loss_step(run, peers if enough else None)
    excursions = _nonfinite(run)
    excursions += _outside(run, peers, threshold, update_threshold) if enough else _limits_crossed(run.monitors)
    in_time = [excursion for excursion in excursions if loss_step is None or excursion.step <= loss_step]
    order = _order(run.monitors)
    first = min(in_time, key=lambda e: (e.step, e.role == UPDATE, -e.beyond, order(e.layer, e.role)), default=None)
    return FirstAnomaly(first, loss_step, len(peers) if enough else 0)


def threshold_of(role: str) -> float:
    """Return the threshold of a role, in spreads from the peers' median."""
    return UPDATE_THRESHOLD if role == UPDATE else THRESHOLD


def _lasting(out: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Return where ``out`` (keys, steps) is true there and also at the key's next ``recorded`` step, if any."""
    kept = np.zeros_like(out)
    following = np.ones(len(out), dtype=bool)
    for step in reversed(range(out.shape[1])):
        kept[:, step] = out[:, step] & following
        following = np.where(recorded[:, step], out[:, step], following)
    return kept


def _loss_step(run: Trace, peers: Peers | None) -> int | None:
    """Return the first step at which a loss is above its band or the run diverged, ``None`` if neither happens."""
    steps = [] if run.diverged is None else [run.diverged]
    if peers and len(run.history):
        bands = loss_bands(run, peers)
        above = bands.beyond > LOSS_THRESHOLD
        at = _lasting(above, bands.values.notna().to_numpy()).any(axis=0)
        steps += list(bands.values.columns[at][:1])
    return min((int(step) for step in steps), default=None)


def _nonfinite(run: Trace) -> list[Excursion]:
    """Return an excursion for each tensor with NaN or infinity in a pass, and `Trace.nonfinite` if no pass saw any."""
    rows = run.monitors[(run.monitors["metric"] == "nonfinite") & (run.monitors["value"] > 0)]
    found = [_at_once(row.layer, row.role, row.step, row.value) for row in rows.itertuples()]
    if run.nonfinite and run.diverged is not None and not any(e.step <= run.diverged for e in found):
        layer, _, role = run.nonfinite.rpartition(" ")
        found.append(_at_once(layer, role, run.diverged, np.nan))
    return found


def _at_once(layer: str, role: str, step: int, value: float) -> Excursion:
    return Excursion(layer, role, "nonfinite", int(step), value, 0.0, 0.0, np.inf)


def _outside(run: Trace, peers: Peers, threshold: float, update_threshold: float) -> list[Excursion]:
    if run.monitors.empty:
        return []
    bands = tensor_bands(run, peers)
    far = bands.beyond
    recorded = bands.values.notna().to_numpy()
    updates = bands.values.index.get_level_values("role") == UPDATE
    limit = np.where(updates, update_threshold, threshold)[:, None]
    lasting = _lasting(far > limit, recorded) | _lasting(far < -limit, recorded)
    found = []
    for row, column in zip(*np.nonzero(lasting), strict=True):
        layer, role, metric = bands.values.index[row]
        seen = [bands.values.iat[row, column], bands.low[row, column], bands.high[row, column]]
        ends = from_binades(metric, np.array(seen))
        value, low, high = ends[0], *sorted(ends[1:])
        step = int(bands.values.columns[column])
        found.append(Excursion(layer, role, metric, step, value, low, high, abs(far[row, column])))
    return found


def _limits_crossed(monitors: pd.DataFrame) -> list[Excursion]:
    """Return an excursion for each value beyond its metric's limit, with ``beyond`` 0: limits are not comparable."""
    found = []
    for metric in METRICS.values():
        rows = monitors[(monitors["metric"] == metric.name) & monitors["role"].isin(metric.watched)]
        for row in rows.itertuples() if metric.name not in OMITTED else ():
            if metric.bound.crossed(row.layer, row.value):
                ends = (row.value, np.nan, np.nan, 0.0)
                found.append(Excursion(row.layer, row.role, metric.name, int(row.step), *ends))
    return found


def _order(monitors: pd.DataFrame) -> Callable[[str, str], tuple[int, int, int]]:
    """Return a sort key for tensors in the order in which they are computed.

    Weights come first, since they exist before the pass, then the forward pass by layer, then gradients in reverse.
    """
    layers = {name: i for i, name in enumerate(monitors["layer"].unique())}

    def place(layer: str, role: str) -> tuple[int, int, int]:
        at = layers.get(layer, len(layers))
        if role == "weight":
            return -1, at, 0
        return (0, at, FORWARD.index(role)) if role in FORWARD else (1 + BACKWARD.index(role), -at, 0)

    return place
