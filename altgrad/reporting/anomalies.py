"""The first anomalous tensor of every run that ended badly: which healthy runs it is held against, and in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from altgrad.config import UserError
from altgrad.config.errors import did_you_mean
from altgrad.metrics import METRICS
from altgrad.metrics.bands import LEAST_PEERS, Peers, Trace
from altgrad.metrics.first_anomaly import Excursion, FirstAnomaly, first_anomaly
from altgrad.metrics.metric import ROLES
from altgrad.reporting.load import COMPLETED, DIVERGED, IDENTITY, MISSING, Study
from altgrad.reporting.wording import number, plural, significant

# Whose runs make the bands: the first of these with enough healthy ones. What they share, and what they are called.
CIRCLES = (
    (["format", "optimizer", "lr_scale"], "of the same format, arm and learning rate"),
    (["format", "optimizer"], "of the same format and arm, at other learning rates too"),
    (["optimizer"], "of the same arm, in other formats too"),
)
TENSORS = ROLES | {"output": "output", "weight_grad": "weight gradient", "update": "update of the weights"}


class Worse(NamedTuple):
    """By how many percent a run ended above a loss, and whose loss that is."""

    percent: float
    than: str


@dataclass(frozen=True)
class Case:
    """A run, what became of it (a clause), and its first anomaly, with the traces that it was found from.

    ``rows``: a sentence on the rows of a layer that a divergence was in, "" where they are not known.
    """

    key: str
    ended: str
    found: FirstAnomaly
    run: Trace
    peers: Peers
    circle: str
    rows: str = ""


def cases(study: Study) -> Iterator[Case]:
    """Yield the case of every cell that diverged or ended worse, in grid order."""
    traces, worse = _Traces(study), ended_worse(study)
    for key, cell in study.cells.iterrows():
        if cell["status"] == DIVERGED or key in worse:
            yield _case(study, key, traces, worse)


def case(study: Study, key: str) -> Case:
    """Return the case of the cell ``key``, however it ended. Raises :class:`UserError` for one without a run."""
    if key not in study.cells.index:
        raise UserError(f"{key}: the grid has no such cell{did_you_mean(key, study.cells.index)}")
    cell = study.cells.loc[key]
    if cell["status"] == MISSING:
        raise UserError(f"{key}: there is no run to explain ({cell['reason']}); run `dvc repro`")
    return _case(study, key, _Traces(study), ended_worse(study))


def ended_worse(study: Study) -> dict[str, Worse]:
    """Return, by key, how far completed runs ended above the baseline, where that is beyond the limit.

    The baseline's loss is the median over its seeds under the same arm, at the arm's best learning rate; where none of
    them completed, that of the best format.
    """
    done = study.of_status(COMPLETED)
    at_rates = done.groupby(["optimizer", "format", "lr_scale"])["val_loss"].median()
    worse = {}
    for key, cell in done.iterrows():
        own = at_rates[cell["optimizer"]]
        formats = own.index.get_level_values("format")
        if study.baseline in formats:
            reference, than = own[formats == study.baseline].min(), "the baseline's"
        else:
            reference = own.min()
            than = f"that of {formats[own.argmin()]}, the best of its arm, where no baseline completed"
        gap = 100 * (cell["val_loss"] / reference - 1)
        if METRICS["val_gap"].bound.crossed("", gap):
            worse[key] = Worse(gap, than)
    return worse


def sentences(found: Case) -> list[str]:
    """Return the case in a few plain sentences."""
    result, first = found.found, found.found.excursion
    told = list(filter(None, [f"{found.key} {found.ended}.", found.rows]))
    left, held = "left its band", f"{plural(result.peers, 'healthy run')} {found.circle}"
    if not result.peers:
        left = "was beyond its limit"
        held = f"the limits of the metrics, as fewer than {LEAST_PEERS} healthy runs are like it"
    if first is None:
        until = " before the loss did" if result.loss_step is not None else ""
        told.append(f"Held against {held}, no tensor {left}{until}.")
        if result.loss_step is not None:
            told.append(f"The loss showed it at step {result.loss_step}; instrumented passes: {_passes(found.run)}.")
        return told
    told.append(f"The first that {left} was the {tensor(first)}, at step {first.step}: {_value(first)}.")
    told.append(f"It was held against {held}.")
    if result.lead is None:
        told.append("The loss never left its own band.")
    else:
        later = "at the same step" if result.lead == 0 else f"{plural(result.lead, 'step')} later"
        told.append(f"The loss showed it at step {result.loss_step}, {later}.")
    return told


def tensor(first: Excursion) -> str:
    """Return what left its band: ``SQNR of the inputs of `blocks.0.mlp.up```."""
    metric = "number of NaN and infinite elements" if first.metric == "nonfinite" else first.metric
    return f"{metric} of the {TENSORS.get(first.role, first.role)} of {first.layer}"


def _value(first: Excursion) -> str:
    unit = METRICS[first.metric].unit
    unit = f" {unit}" if unit in ("dB", "rungs", "ulp") else ""
    if first.metric == "nonfinite":
        return "a healthy tensor has none" if np.isnan(first.value) else f"{first.value:g}, a healthy tensor has none"
    value = "not finite" if not np.isfinite(first.value) else significant(first.value) + unit
    if np.isnan(first.low):
        return f"{value}, beyond the limit of {METRICS[first.metric].bound.of(first.layer):g}"
    return f"{value}, where healthy runs have {significant(first.low)} to {significant(first.high)}{unit}"


def _passes(run: Trace) -> str:
    steps = sorted(int(step) for step in run.monitors["step"].unique())
    return ", ".join(map(str, steps[:6])) + (f", … {steps[-1]}" if len(steps) > 6 else "") if steps else "none"


class _Traces:
    """What the runs of a study recorded, by key."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.frames = [dict(list(frame.groupby(IDENTITY, sort=False))) for frame in (study.monitors, study.history)]
        self.known: dict[str, Trace] = {}
        self.together: dict[tuple[str, ...], Peers] = {}

    def __getitem__(self, key: str) -> Trace:
        if key not in self.known:
            cell = self.study.cells.loc[key]
            empty = (self.study.monitors.iloc[:0], self.study.history.iloc[:0])
            monitors, history = (
                frames.get(tuple(cell[IDENTITY]), none) for frames, none in zip(self.frames, empty, strict=True)
            )
            diverged = int(cell["outcome_step"]) if cell["status"] == DIVERGED else None
            self.known[key] = Trace(monitors, history, diverged, cell["first_nonfinite"])
        return self.known[key]

    def peers(self, keys: Iterable[str]) -> Peers:
        """Return those of several cells: the same one for the same cells."""
        keys = tuple(keys)
        if keys not in self.together:
            self.together[keys] = Peers(self[key] for key in keys)
        return self.together[keys]


def _case(study: Study, key: str, traces: _Traces, worse: dict[str, Worse]) -> Case:
    cell = study.cells.loc[key]
    healthy = study.of_status(COMPLETED).drop([*worse, key], errors="ignore")
    circles = [(healthy[(healthy[shared] == cell[shared]).all(axis=1)].index, name) for shared, name in CIRCLES]
    like, circle = next((found for found in circles if len(found[0]) >= LEAST_PEERS), circles[-1])
    peers = traces.peers(like)
    found = first_anomaly(traces[key], peers)
    return Case(key, _ended(cell, worse.get(key)), found, traces[key], peers, circle, _rows(cell))


def _rows(cell: pd.Series) -> str:
    if not cell["first_rows"]:
        return ""
    if cell["first_nonfinite"]:
        layer, _, role = cell["first_nonfinite"].rpartition(" ")
        return f"NaN and infinity came first in the {TENSORS.get(role, role)} of {layer}: {cell['first_rows']}."
    return f"Until that was found, none had gone as far beside the rest of their layer as {cell['first_rows']}."


def _ended(cell: pd.Series, worse: Worse | None) -> str:
    if cell["status"] == DIVERGED:
        return f"diverged at step {cell['outcome_step']:.0f} ({cell['signature']})"
    if worse is not None:
        return f"ended with a validation loss {number(worse.percent, 0)} % above {worse.than}"
    return "neither diverged nor ended worse"
