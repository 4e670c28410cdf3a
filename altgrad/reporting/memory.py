"""What training keeps in memory for a parameter, and which runs nothing of as few bytes is as good as."""

from __future__ import annotations

import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.runs import RUN

BYTES = "bytes_per_parameter"


def memory(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return bytes per parameter (weights, master weights, gradients, optimizer state) and milliseconds of a step.

    A row per format and optimizer at its best learning rate, with the median over completed runs; empty where all
    train in the same bytes, so that there is nothing to choose by.
    """
    completed = study.cells[study.cells["status"] == COMPLETED].merge(comparison.best[list(RUN)])
    found = completed.groupby(["format", "optimizer"], sort=False)[[BYTES, "step_ms_median"]].median().dropna()
    return found if found[BYTES].round(2).nunique() > 1 else found.iloc[:0]


def front(bytes_kept: pd.Series, values: pd.Series, *, higher_is_better: bool = False) -> list[int]:
    """Return the labels of the Pareto front by ascending bytes: no other run of as few bytes is as good or better."""
    rows = pd.DataFrame({"bytes": bytes_kept, "value": -values if higher_is_better else values})
    rows = rows.sort_values(["bytes", "value"], kind="stable")
    return rows.index[rows["value"] < rows["value"].cummin().shift(fill_value=float("inf"))].tolist()
