"""Which tensor left its band first, in a run that diverged or ended worse: the first cause.

A run's live measurements are held against those of healthy runs, its *peers*, metric by metric, tensor by tensor and
pass by pass. Values are compared in binades (log2; precision in dB over 6.02), so one floor serves all. The band is the
peers' median at that step, give or take `THRESHOLD` spreads. A spread is pooled: over the steps of a tensor, and half
of it over all layers, since a few runs know little of one tensor. An excursion counts when the next pass has it too, or
there is none. With fewer than `LEAST_PEERS` there is no band, and the limits of the metrics' rows take its place.

The first cause is the earliest excursion that is no later than the loss's own; what leaves its band after the loss
rose, by `LOSS_THRESHOLD` spreads, is a consequence. So is an update beside a tensor of the same step, whose gradients
it is made of.

Of several tensors in the same pass the one that is farthest out is named, and of those that are equally
far, as NaN is, weights before the rest, which is named as it is computed.

The thresholds were chosen on planted faults, and what they find in others stands in reports/first_cause. Updates have
one of their own: they vary more from step to step than from run to run, and a spread is over steps too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from altgrad.metrics import METRICS

THRESHOLD = 12.0  # spreads, of tensors; see the module
UPDATE_THRESHOLD = 8.0  # of updates
LOSS_THRESHOLD = 4.0  # of the loss: set by hand after a first look at planted faults, chosen on no score
LEAST_PEERS = 3
FLOOR = 1 / 16  # binades: no spread of a tensor is taken for smaller ...
LOSS_FLOOR = 1 / 64  # ... nor one of the loss: 1.1 %
KEY = ["layer", "role", "metric"]
LOSSES = ["train_loss", "val_loss"]
LEAST_SHARE = 2.0**-10  # a share is compared as if so much were added, or 0 would be infinitely far from anything
PER_BINADE = 20 * np.log10(2)  # dB
UPDATE = "update"
WEIGHT = "weight"
FORWARD, BACKWARD = ("input", "output"), ("grad", "weight_grad", UPDATE)  # a pass, in order
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
        """Loss x step, in binades."""
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
        """Of every tensor and metric."""
        return Healthy.of([peer.tensors for peer in self])

    @cached_property
    def losses(self) -> Healthy:
        """Of the losses."""
        return Healthy.of([peer.losses for peer in self])


@dataclass(frozen=True)
class Excursion:
    """A value outside its band: ``low`` and ``high`` are the smallest and largest of the peers' values at that step,
    NaN without peers; ``beyond`` is how far out it is, in spreads."""

    layer: str
    role: str
    metric: str
    step: int
    value: float
    low: float
    high: float
    beyond: float


@dataclass(frozen=True)
class FirstCause:
    """What was found: ``excursion`` is None where no tensor left its band before the loss did.

    ``loss_step`` is where the loss left its own, or the run was found to have diverged, None if neither happened.
    ``peers`` is the number of healthy runs that made the bands, 0 where limits took their place.
    """

    excursion: Excursion | None
    loss_step: int | None
    peers: int

    @property
    def lead(self) -> int | None:
        """Steps from the excursion to the loss's."""
        if self.excursion is None or self.loss_step is None:
            return None
        return self.loss_step - self.excursion.step


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


def first_cause(
    run: Trace, peers: Peers, threshold: float = THRESHOLD, update_threshold: float = UPDATE_THRESHOLD
) -> FirstCause:
    """Return the first cause of what happened to ``run``; see the module. ``peers`` are without it."""
    enough = len(peers) >= LEAST_PEERS
    loss_step = _loss_step(run, peers if enough else None)
    found = _nonfinite(run)
    found += _outside(run, peers, threshold, update_threshold) if enough else _limits_crossed(run.monitors)
    found = [excursion for excursion in found if loss_step is None or excursion.step <= loss_step]
    order = _order(run.monitors)
    first = min(found, key=lambda e: (e.step, e.role == UPDATE, -e.beyond, order(e.layer, e.role)), default=None)
    return FirstCause(first, loss_step, len(peers) if enough else 0)


def tensor_bands(run: Trace, peers: Peers) -> Bands:
    """Return the bands of every tensor and metric that ``run`` has, at its steps."""
    values = run.tensors
    groups = values.index.droplevel("layer")
    return _bands(values, peers.tensors, groups, FLOOR)


def loss_bands(run: Trace, peers: Peers) -> Bands:
    """Return the bands of the losses, keyed by their names."""
    values = run.losses
    return _bands(values, peers.losses, values.index, LOSS_FLOOR)


def threshold_of(role: str) -> float:
    """Return how many spreads from the peers' median a tensor's band ends, or that of updates."""
    return UPDATE_THRESHOLD if role == UPDATE else THRESHOLD


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


def _lasting(out: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """Return where ``out`` (keys, steps) holds and holds in the key's next recorded pass too, or there is none."""
    kept = np.zeros_like(out)
    following = np.ones(len(out), dtype=bool)
    for step in reversed(range(out.shape[1])):
        kept[:, step] = out[:, step] & following
        following = np.where(recorded[:, step], out[:, step], following)
    return kept


def _loss_step(run: Trace, peers: Peers | None) -> int | None:
    """Return the first step at which a loss is above its band or the run has diverged, None if that never was."""
    steps = [] if run.diverged is None else [run.diverged]
    if peers and len(run.history):
        bands = loss_bands(run, peers)
        above = bands.beyond > LOSS_THRESHOLD
        at = _lasting(above, bands.values.notna().to_numpy()).any(axis=0)
        steps += list(bands.values.columns[at][:1])
    return min((int(step) for step in steps), default=None)


def _nonfinite(run: Trace) -> list[Excursion]:
    """Return the tensors in which a pass, or the look at the step of a divergence, saw NaN or infinity."""
    rows = run.monitors[(run.monitors["metric"] == "nonfinite") & (run.monitors["value"] > 0)]
    found = [_at_once(row.layer, row.role, row.step, row.value) for row in rows.itertuples()]
    if run.nonfinite and run.diverged is not None and not any(e.step <= run.diverged for e in found):
        layer, _, role = run.nonfinite.rpartition(" ")
        found.append(_at_once(layer, role, run.diverged, np.nan))
    return found


def _at_once(layer: str, role: str, step: int, value: float) -> Excursion:
    return Excursion(layer, role, "nonfinite", int(step), value, 0.0, 0.0, np.inf)


def _outside(run: Trace, peers: Peers, threshold: float, update_threshold: float) -> list[Excursion]:
    """Return the excursions from the peers' bands."""
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
    """Return the values beyond the limits of their rows, all equally far, as limits of two metrics do not compare."""
    found = []
    for metric in METRICS.values():
        rows = monitors[(monitors["metric"] == metric.name) & monitors["role"].isin(metric.watched)]
        for row in rows.itertuples() if metric.name not in OMITTED else ():
            if metric.bound.crossed(row.layer, row.value):
                ends = (row.value, np.nan, np.nan, 0.0)
                found.append(Excursion(row.layer, row.role, metric.name, int(row.step), *ends))
    return found


def _order(monitors: pd.DataFrame) -> Callable[[str, str], tuple[int, int, int]]:
    """Return a key by which tensors come as they are computed: forward layer by layer, gradients back again.

    Weights come before all others: they are there before the pass, and the head's may be the embedding's.
    """
    layers = {name: i for i, name in enumerate(monitors["layer"].unique())}

    def place(layer: str, role: str) -> tuple[int, int, int]:
        at = layers.get(layer, len(layers))
        if role == WEIGHT:
            return -1, at, 0
        return (0, at, FORWARD.index(role)) if role in FORWARD else (1 + BACKWARD.index(role), -at, 0)

    return place
