"""The first anomalous tensor of every run that ended badly: which healthy runs it is held against, and in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

from altgrad.common.errors import UserError, did_you_mean
from altgrad.metrics import METRICS
from altgrad.metrics.first_anomaly import LEAST_PEERS, Excursion, FirstAnomaly, Peers, Trace, first_anomaly
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
    found, worse = _finder(study), ended_worse(study)
    return (found(key) for key, status in study.cells["status"].items() if status == DIVERGED or key in worse)


def case(study: Study, key: str) -> Case:
    """Return the case of the cell ``key``, however it ended. Raises :class:`UserError` for one without a run."""
    if key not in study.cells.index:
        raise UserError(f"{key}: the grid has no such cell{did_you_mean(key, study.cells.index)}")
    cell = study.cells.loc[key]
    if cell["status"] == MISSING:
        raise UserError(f"{key}: there is no run to explain ({cell['reason']}); run `dvc repro`")
    return _finder(study)(key)


def ended_worse(study: Study) -> dict[str, tuple[float, str]]:
    """Return, by key, by how many percent completed runs ended above the baseline, and whose loss that is.

    Of those where it is beyond the limit. The baseline's loss is the median over its seeds under the same arm, at the
    arm's best learning rate; where none of them completed, that of the best format.
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
            worse[key] = gap, than
    return worse


def _finder(study: Study) -> Callable[[str], Case]:
    """Return what finds the case of a cell by its key."""
    worse, empty = ended_worse(study), (study.monitors.iloc[:0], study.history.iloc[:0])
    frames = [dict(list(frame.groupby(IDENTITY, sort=False))) for frame in (study.monitors, study.history)]

    @cache
    def trace(key: str) -> Trace:
        cell = study.cells.loc[key]
        monitors, history = (own.get(tuple(cell[IDENTITY]), none) for own, none in zip(frames, empty, strict=True))
        diverged = int(cell["outcome_step"]) if cell["status"] == DIVERGED else None
        return Trace(monitors, history, diverged, cell["first_nonfinite"])

    @cache
    def peers_of(keys: tuple[str, ...]) -> Peers:
        return Peers(trace(key) for key in keys)

    def found(key: str) -> Case:
        cell, ended = study.cells.loc[key], "neither diverged nor ended worse"
        if cell["status"] == DIVERGED:
            ended = f"diverged at step {cell['outcome_step']:.0f} ({cell['signature']})"
        elif key in worse:
            percent, than = worse[key]
            ended = f"ended with a validation loss {number(percent, 0)} % above {than}"
        healthy = study.of_status(COMPLETED).drop([*worse, key], errors="ignore")
        circles = [(healthy[(healthy[shared] == cell[shared]).all(axis=1)].index, name) for shared, name in CIRCLES]
        like, circle = next((found for found in circles if len(found[0]) >= LEAST_PEERS), circles[-1])
        peers = peers_of(tuple(like))
        return Case(key, ended, first_anomaly(trace(key), peers), trace(key), peers, circle, _rows(cell))

    return found


def _rows(cell: pd.Series) -> str:
    if not cell["first_rows"]:
        return ""
    if cell["first_nonfinite"]:
        layer, _, role = cell["first_nonfinite"].rpartition(" ")
        return f"NaN and infinity came first in the {TENSORS.get(role, role)} of {layer}: {cell['first_rows']}."
    return f"Until that was found, none had gone as far beside the rest of their layer as {cell['first_rows']}."


def sentences(found: Case) -> list[str]:
    """Return the case in a few plain sentences."""
    result, first, showed = found.found, found.found.excursion, f"The loss showed it at step {found.found.loss_step}"
    told = list(filter(None, [f"{found.key} {found.ended}.", found.rows]))
    left, held = "left its band", f"{plural(result.peers, 'healthy run')} {found.circle}"
    if not result.peers:
        left = "was beyond its limit"
        held = f"the limits of the metrics, as fewer than {LEAST_PEERS} healthy runs are like it"
    if first is None and result.loss_step is None:
        return [*told, f"Held against {held}, no tensor {left}."]
    if first is None:
        passes = [f"{step:.0f}" for step in sorted(found.run.monitors["step"].unique())]
        seen = ", ".join(passes if len(passes) <= 6 else [*passes[:6], f"… {passes[-1]}"]) or "none"
        no_tensor = f"Held against {held}, no tensor {left} before the loss did."
        return [*told, no_tensor, f"{showed}; instrumented passes: {seen}."]
    told.append(f"The first that {left} was the {tensor(first)}, at step {first.step}: {_value(first)}.")
    told.append(f"It was held against {held}.")
    if result.lead is None:
        return [*told, "The loss never left its own band."]
    later = f"{plural(result.lead, 'step')} later" if result.lead else "at the same step"
    return [*told, f"{showed}, {later}."]


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
