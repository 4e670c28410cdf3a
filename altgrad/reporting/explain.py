"""What a format's cost goes with: its mean precision per quantized role, side by side with the cost.

A correlation over a handful of formats is a hint where to look, not a cause, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import late, per_layer, shown_optimizer
from altgrad.reporting.load import Study
from altgrad.reporting.roles import is_quantized
from altgrad.reporting.statistics import rank_correlation

LEAST_SPREAD_DB = 1.0


@dataclass(frozen=True)
class Measure:
    """Where a precision comes from (role and metric of the monitors) and how it is labelled."""

    role: str
    metric: str
    title: str
    label: str


MEASURES = {
    "weight_sqnr": Measure("weight", "sqnr_db", "weights", "SQNR (dB)"),
    "input_sqnr": Measure("input", "sqnr_db", "inputs", "SQNR (dB)"),
    "grad_sqnr": Measure("grad", "sqnr_db", "incoming gradients", "SQNR (dB)"),
}


def explanation(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return a row per format: ``cost`` (paired difference in loss to the baseline) and each measure.

    A measure is the mean over layers, over the instrumented passes of the second half of the run and
    over seeds. The baseline has no row, and neither has an entry that quantizes nothing.
    """
    best = comparison.best[comparison.best["optimizer"] == shown_optimizer(study, comparison)].set_index("format")
    names = [name for name in study.formats if name != study.baseline and is_quantized(study, name)]
    cost = {name: best.loc[name, "difference"].mean for name in names if best.loc[name, "difference"] is not None}
    table = pd.DataFrame({"cost": pd.Series(cost, dtype="float64")}, index=pd.Index(names, name="format"))
    monitors = late(per_layer(study.monitors, study, comparison))
    for key, measure in MEASURES.items():
        rows = monitors[(monitors["role"] == measure.role) & (monitors["metric"] == measure.metric)]
        table[key] = rows.groupby("format")["value"].mean()
    return table


def correlations(table: pd.DataFrame) -> dict[str, tuple[float, int]]:
    """Return Spearman's rho between the cost and each measure, and the number of formats behind it.

    Formats that repeat one another exactly count once. A measure in which the formats hardly differ,
    such as that of gradients that all are in one format, has none: its ranks would be noise. A format
    without a cost has no rank, and makes no difference to that.
    """
    distinct = table.dropna(subset="cost").drop_duplicates()
    spread = distinct[list(MEASURES)].max() - distinct[list(MEASURES)].min()
    return {m: rank_correlation(distinct[m], distinct["cost"]) for m in MEASURES if spread[m] >= LEAST_SPREAD_DB}
