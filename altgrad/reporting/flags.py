"""Everything that crossed the level at which it deserves a look: live monitors and offline diagnoses in one list.

The limits are those of the metrics' rows; the flags of the diagnoses come with them.
"""

from __future__ import annotations

import pandas as pd

from altgrad.metrics import METRICS, Metric
from altgrad.reporting.anomalies import TENSORS
from altgrad.reporting.load import IDENTITY, Study

COLUMNS = [*IDENTITY, "what", "layer", "value", "limit"]

def raised(study: Study) -> pd.DataFrame:
    """Return a row per flag: the cell's identity, what it is, the layer or "" for the whole run, worst value, limit."""
    parts = [_watched(study, role, metric) for metric in METRICS.values() for role in metric.watched]
    parts += [
        _beyond(_gradient_ratio(study), "gradient_ratio"),
        _beyond(study.cells, "clipped_frac"),
        _diagnosed(study),
    ]
    filled = [part[COLUMNS] for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=COLUMNS)


def _watched(study: Study, role: str, metric: Metric) -> pd.DataFrame:
    """Flag a layer when any instrumented pass was beyond the metric's limit."""
    rows = study.monitors[(study.monitors["role"] == role) & (study.monitors["metric"] == metric.name)]
    limit = metric.bound
    crossed = [limit.crossed(layer, value) for layer, value in zip(rows["layer"], rows["value"], strict=True)]
    layers = rows.loc[crossed].groupby([*IDENTITY, "layer"], sort=False)["value"]
    worst = (layers.max() if limit.above else layers.min()).reset_index()
    return worst.assign(what=named(metric, role), limit=worst["layer"].map(limit.of))


def _gradient_ratio(study: Study) -> pd.DataFrame:
    """Return by how much the first or last layer's gradient norm exceeded the other's at most, a row per run."""
    rows = study.monitors[
        (study.monitors["role"] == "weight_grad") & (study.monitors["metric"] == "l2") & (study.monitors["value"] > 0)
    ]
    if rows.empty:
        return pd.DataFrame(columns=[*IDENTITY, "gradient_ratio"])
    ends = rows.groupby([*IDENTITY, "step"], sort=False)["value"].agg(["first", "last"])
    ratio = (ends["first"] / ends["last"]).map(lambda r: max(r, 1 / r)).groupby(IDENTITY, sort=False).max()
    return ratio.rename("gradient_ratio").reset_index()


def _beyond(runs: pd.DataFrame, name: str) -> pd.DataFrame:
    """Flag the rows, each of a whole run, whose column ``name`` is beyond that metric's limit."""
    limit = METRICS[name].bound
    rows = runs.loc[[limit.crossed("", value) for value in runs[name]]].rename(columns={name: "value"})
    return rows.assign(what=named(METRICS[name]), layer="", limit=limit.value)


def _diagnosed(study: Study) -> pd.DataFrame:
    known = METRICS | study.metrics
    what = {name: named(known[name], known[name].offline or "") for name in study.flags["metric"].unique()}
    return study.flags.assign(what=study.flags["metric"].map(what))


def named(metric: Metric, role: str = "") -> str:
    """Return what is flagged: the metric, as ``python -m altgrad.metrics`` defines it, of tensors or of a whole run."""
    return f"{metric.name}{f' of {TENSORS[role]}' if role else ''} ({metric.unit})"
