"""Everything that crossed the level at which it deserves a look: live monitors and offline diagnoses in one list.

The limits are those of the metrics' rows; the flags of the diagnoses come with them.
"""

from __future__ import annotations

import math

import pandas as pd

from altgrad.metrics import METRICS, Metric
from altgrad.metrics.metric import ROLES
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import IDENTITY, Study

COLUMNS = [*IDENTITY, "what", "layer", "value", "limit"]

# What is flagged in words, by role and metric; "" is the whole run. One that is not here goes by its name.
WHAT = {
    ("input", "overflow_frac"): "inputs beyond the format's maximum (share)",
    ("grad", "underflow_frac"): "incoming gradients rounded to zero (share)",
    ("output", "kurtosis"): "excess kurtosis of a block's output",
    ("output", "attention_low_heads"): "heads whose attention has an entropy below 1 nat (count)",
    **{(role, "nonfinite"): "elements that are NaN or infinite (count)" for role in ("weight", "input", "grad")},
    ("weight", "boundary_frac"): "weights at the edge of the range (share)",
    ("weight", "underflow_frac"): "weights rounded to zero (share)",
    ("weight", "effective_rank_kept"): "effective rank, share of the initial",
    ("weight_grad", "grad_snr_db"): "gradient SNR (dB)",
    ("weight_grad", "gradient_to_noise"): "gradient over its quantization noise (ratio)",
    ("", "clipped_frac"): "steps with clipped gradient (share)",
    ("", "gradient_ratio"): "gradient norm of the first layer against the last (ratio)",
    ("", "val_gap"): "validation loss above the baseline's (%)",
    ("", "train_gap"): "training loss above the baseline's (%)",
}


def raised(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return a row per flag: the cell's identity, what it is, the layer or "" for the whole run, worst value, limit."""
    parts = [_watched(study, role, metric) for metric in METRICS.values() for role in metric.watched]
    parts += [
        _beyond(_gradient_ratio(study), "gradient_ratio"),
        _beyond(study.cells, "clipped_frac"),
        _diagnosed(study),
        *(_beyond(comparison.results.assign(seed=math.nan), gap) for gap in ("val_gap", "train_gap")),
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
    named = f"{metric.name} of {ROLES.get(role, role)} ({metric.unit})"
    return worst.assign(what=WHAT.get((role, metric.name), named), limit=worst["layer"].map(limit.of))


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
    """Flag the rows, each of a whole run or arm, whose column ``name`` is beyond that metric's limit."""
    limit = METRICS[name].bound
    rows = runs.loc[[limit.crossed("", value) for value in runs[name]]].rename(columns={name: "value"})
    return rows.assign(what=WHAT["", name], layer="", limit=limit.value)


def _diagnosed(study: Study) -> pd.DataFrame:
    what = {name: text for (role, name), text in WHAT.items() if role and METRICS[name].offline == role}
    return study.flags.assign(what=study.flags["metric"].map(lambda name: what.get(name, name)))
