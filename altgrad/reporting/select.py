"""Which rows a figure or a table shows: each arm at its best learning rate, one optimizer where it is per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, IDENTITY, Study
from altgrad.reporting.statistics import RUN

BYTES = "bytes_per_parameter"


def among(frame: pd.DataFrame, runs: pd.DataFrame, keys: Sequence[str] = IDENTITY) -> pd.Series:
    """Return which rows of ``frame`` are of ``runs``: have the ``keys`` of one of them."""
    known = pd.MultiIndex.from_frame(runs[list(keys)])
    return pd.Series(pd.MultiIndex.from_frame(frame[list(keys)]).isin(known), frame.index)


def at_best(frame: pd.DataFrame, comparison: Comparison) -> pd.DataFrame:
    """Return the rows of ``frame`` whose learning rate is the best of their (format, optimizer)."""
    return frame[among(frame, comparison.best, RUN)]


def of_completed(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Return the rows of ``frame`` that are of runs that completed."""
    return frame[among(frame, study.of_status(COMPLETED))]


def shown_optimizer(study: Study, comparison: Comparison) -> str:
    """Return the optimizer whose cells the per-layer figures show: the baseline optimizer where there is one."""
    return comparison.reference or study.optimizers[0]


def per_layer(frame: pd.DataFrame, study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return the rows of the shown optimizer at the best learning rates, of completed runs.

    A format of which no run completed is shown by its diverged ones.
    """
    frame = at_best(frame[frame["optimizer"] == shown_optimizer(study, comparison)], comparison)
    rows = among(frame, study.of_status(COMPLETED))
    return frame[rows | ~frame["format"].isin(frame.loc[rows, "format"].unique())]


def late(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the second half of each run: what a format does once weights have settled."""
    return frame[frame["step"] >= frame.groupby(IDENTITY)["step"].transform("max") / 2]


def in_order(known: Iterable[str], found: Iterable[str]) -> list[str]:
    """Return those of ``known``, such as the grid's formats, that are ``found``."""
    present = set(found)
    return [name for name in known if name in present]


def memory(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return bytes per parameter (weights, master weights, gradients, optimizer state) and milliseconds of a step.

    A row per format and optimizer at its best learning rate, with the median over completed runs; empty where all
    train in the same bytes, so that there is nothing to choose by.
    """
    completed = at_best(study.of_status(COMPLETED), comparison)
    found = completed.groupby(["format", "optimizer"], sort=False)[[BYTES, "step_ms_median"]].median().dropna()
    return found if found[BYTES].round(2).nunique() > 1 else found.iloc[:0]
