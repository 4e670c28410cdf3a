"""Which tensor left the band of healthy runs first, in a run that diverged or ended worse: the first anomalous tensor.

An excursion is a value more than `THRESHOLD` spreads from the middle of its band, see `altgrad.metrics.bands`. It
counts when the next pass has it too, or there is none. With too few healthy runs for a band, the limits of the metrics'
rows take its place.

The first anomaly is the earliest excursion that is no later than the loss's own; what leaves its band after the loss
rose, by `LOSS_THRESHOLD` spreads, is a consequence. So is an update beside a tensor of the same step, whose gradients
it is made of.

Of several tensors in the same pass the one that is farthest out is named, and of those that are equally
far, as NaN is, weights before the rest, which is named as it is computed.

The thresholds were chosen on injected faults, and what they find in others stands in reports/first_anomaly. Updates
have one of their own: they vary more from step to step than from run to run, and a spread is over steps too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from altgrad.metrics.bands import LEAST_PEERS, OMITTED, Peers, Trace, from_binades, loss_bands, tensor_bands
from altgrad.metrics.table import METRICS

THRESHOLD = 12.0  # spreads, of tensors; see the module
UPDATE_THRESHOLD = 8.0  # of updates
LOSS_THRESHOLD = 4.0  # of the loss: set by hand after a first look at injected faults, chosen on no score
UPDATE = "update"
WEIGHT = "weight"
FORWARD, BACKWARD = ("input", "output"), ("grad", "weight_grad", UPDATE)  # a pass, in order


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
class FirstAnomaly:
    """What was found: ``excursion`` is None where no tensor left its band before the loss did.

    ``loss_step`` is where the loss left its own, or the run was found to have diverged, None if neither happened.
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
    """Return what left its band first in ``run``; see the module. ``peers`` are without it."""
    enough = len(peers) >= LEAST_PEERS
    loss_step = _loss_step(run, peers if enough else None)
    found = _nonfinite(run)
    found += _outside(run, peers, threshold, update_threshold) if enough else _limits_crossed(run.monitors)
    found = [excursion for excursion in found if loss_step is None or excursion.step <= loss_step]
    order = _order(run.monitors)
    first = min(found, key=lambda e: (e.step, e.role == UPDATE, -e.beyond, order(e.layer, e.role)), default=None)
    return FirstAnomaly(first, loss_step, len(peers) if enough else 0)


def threshold_of(role: str) -> float:
    """Return how many spreads from the peers' median a tensor's band ends, or that of updates."""
    return UPDATE_THRESHOLD if role == UPDATE else THRESHOLD


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
