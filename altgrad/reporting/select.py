"""Which rows a figure or a table shows: each arm at its best learning rate, one optimizer where it is per layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from altgrad.config.recipe import last_matching
from altgrad.formats import Format
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, IDENTITY, Study
from altgrad.reporting.runs import RUN

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


def last(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each run's last step."""
    return frame[frame["step"] == frame.groupby(IDENTITY)["step"].transform("max")]


def in_order(known: Iterable[str], found: Iterable[str]) -> list[str]:
    """Return those of ``known``, such as the grid's formats, that are ``found``."""
    present = set(found)
    return [name for name in known if name in present]


def layer_order(study: Study, frame: pd.DataFrame) -> list[str]:
    """Return the layers that ``frame`` has rows of, in the order in which data flows through the model."""
    return in_order(study.monitors["layer"].unique(), frame["layer"].unique())


def memory(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return bytes per parameter (weights, master weights, gradients, optimizer state) and milliseconds of a step.

    A row per format and optimizer at its best learning rate, with the median over completed runs; empty where all
    train in the same bytes, so that there is nothing to choose by.
    """
    completed = at_best(study.of_status(COMPLETED), comparison)
    found = completed.groupby(["format", "optimizer"], sort=False)[[BYTES, "step_ms_median"]].median().dropna()
    return found if found[BYTES].round(2).nunique() > 1 else found.iloc[:0]


def weight_format(study: Study, name: str, layers: Iterable[str]) -> tuple[Format, list[str]] | None:
    """Return the format that most of ``layers`` keep their weights in under grid entry ``name``, and those layers.

    A recipe may mix formats; codes of different ones share no axis. ``None`` when no weight is quantized.
    """
    every = list(dict.fromkeys([*study.monitors["layer"][study.monitors["role"] == "weight"], *layers]))
    rules = ((rule["layers"], rule.get("last", 1), rule["weight"]) for rule in study.last_rules(name))
    weights = last_matching(every, rules)
    by_format: dict[str, list[str]] = {}
    for layer in dict.fromkeys(layers):
        if (weight := weights.get(layer)) is not None:
            by_format.setdefault(weight["format"], []).append(layer)
    if not by_format:
        return None
    used = max(by_format, key=lambda fmt: len(by_format[fmt]))
    return Format(**study.entry(name)["formats"][used]), by_format[used]
