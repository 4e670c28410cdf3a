"""Everything that crossed the level at which it deserves a look: live monitors and offline diagnoses in one list.

The limits of the diagnoses come with them. The limits of what training recorded live stand here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from altgrad.reporting.compare import TRAIN_GAP_LIMIT, VAL_GAP_LIMIT, Comparison
from altgrad.reporting.load import IDENTITY, Study

COLUMNS = [*IDENTITY, "what", "layer", "value", "limit"]
CLIPPED_LIMIT = 0.5
GRADIENT_RATIO_LIMIT = 100.0


@dataclass(frozen=True)
class Watch:
    """A monitored metric of one role that is flagged when any instrumented pass saw it above ``limit``."""

    role: str
    metric: str
    limit: float
    what: str


WATCHED = (
    Watch("input", "overflow_frac", 0.01, "inputs beyond the format's maximum (share)"),
    Watch("grad", "underflow_frac", 0.1, "incoming gradients rounded to zero (share)"),
    Watch("output", "kurtosis", 10.0, "excess kurtosis of a block's output"),
    *(
        Watch(role, "nonfinite", 0.0, "elements that are NaN or infinite (count)")
        for role in ("weight", "input", "grad")
    ),
)
DIAGNOSED = {
    "boundary_frac": "weights at the edge of the range (share)",
    "underflow_frac": "weights rounded to zero (share)",
    "effective_rank_kept": "effective rank, share of the initial",
    "grad_snr_db": "gradient SNR (dB)",
}


def raised(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return a row per flag: the cell's identity, what it is, the layer or "" for the whole run, worst value, limit."""
    parts = [_watched(study, watch) for watch in WATCHED]
    parts += [_gradient_ratio(study), _clipped(study), _diagnosed(study)]
    parts += [
        _gap(study, comparison, loss, limit)
        for loss, limit in (("val_loss", VAL_GAP_LIMIT), ("train_loss", TRAIN_GAP_LIMIT))
    ]
    filled = [part[COLUMNS] for part in parts if len(part)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=COLUMNS)


def _watched(study: Study, watch: Watch) -> pd.DataFrame:
    rows = study.monitors[(study.monitors["role"] == watch.role) & (study.monitors["metric"] == watch.metric)]
    worst = rows[rows["value"] > watch.limit].groupby([*IDENTITY, "layer"], sort=False)["value"].max().reset_index()
    return worst.assign(what=watch.what, limit=watch.limit)


def _gradient_ratio(study: Study) -> pd.DataFrame:
    """Flag a run in which the first or last layer's gradient norm exceeded the other's a hundredfold."""
    rows = study.monitors[
        (study.monitors["role"] == "weight_grad") & (study.monitors["metric"] == "l2") & (study.monitors["value"] > 0)
    ]
    if rows.empty:
        return pd.DataFrame(columns=COLUMNS)
    ends = rows.groupby([*IDENTITY, "step"], sort=False)["value"].agg(["first", "last"])
    ratio = (ends["first"] / ends["last"]).map(lambda r: max(r, 1 / r)).groupby(IDENTITY, sort=False).max()
    flagged = ratio[ratio > GRADIENT_RATIO_LIMIT].rename("value").reset_index()
    return flagged.assign(
        what="gradient norm of the first layer against the last (ratio)", layer="", limit=GRADIENT_RATIO_LIMIT
    )


def _clipped(study: Study) -> pd.DataFrame:
    rows = study.cells[study.cells["clipped_frac"] > CLIPPED_LIMIT].rename(columns={"clipped_frac": "value"})
    return rows.assign(what="steps with clipped gradient (share)", layer="", limit=CLIPPED_LIMIT)


def _diagnosed(study: Study) -> pd.DataFrame:
    return study.flags.assign(what=study.flags["metric"].map(lambda name: DIAGNOSED.get(name, name)))


def _gap(study: Study, comparison: Comparison, loss: str, limit: float) -> pd.DataFrame:
    """Flag the arms whose mean gap to the baseline, in percent, is above the limit; a row per arm."""
    gap = "val_gap" if loss == "val_loss" else "train_gap"
    rows = comparison.results[comparison.results[gap] > limit].rename(columns={gap: "value"})
    name = "validation" if loss == "val_loss" else "training"
    return rows.assign(what=f"{name} loss above the baseline's (%)", layer="", limit=limit, seed=math.nan)
