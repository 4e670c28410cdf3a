"""Which rows a figure shows: each arm at its best learning rate, one optimizer for pictures per layer."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from altgrad.config.recipe import last_matching
from altgrad.formats import Format
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, IDENTITY, Study


def at_best(frame: pd.DataFrame, comparison: Comparison) -> pd.DataFrame:
    """Return the rows of ``frame`` whose learning rate is the best of their (format, optimizer)."""
    keys = ["format", "optimizer", "lr_scale"]
    best = pd.MultiIndex.from_frame(comparison.best[keys])
    return frame[pd.MultiIndex.from_frame(frame[keys]).isin(best)]


def of_completed(frame: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Return the rows of ``frame`` that are of runs that completed."""
    completed = pd.MultiIndex.from_frame(study.cells.loc[study.cells["status"] == COMPLETED, IDENTITY])
    return frame[pd.MultiIndex.from_frame(frame[IDENTITY]).isin(completed)]


def shown_optimizer(study: Study, comparison: Comparison) -> str:
    """Return the optimizer whose cells the per-layer figures show: the baseline optimizer where there is one."""
    return comparison.reference or study.optimizers[0]


def per_layer(frame: pd.DataFrame, study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return the rows of the shown optimizer at the best learning rates, of completed runs.

    A format of which no run completed is shown by its diverged ones.
    """
    frame = at_best(frame[frame["optimizer"] == shown_optimizer(study, comparison)], comparison)
    completed = study.cells[study.cells["status"] == COMPLETED]
    rows = pd.MultiIndex.from_frame(frame[IDENTITY]).isin(pd.MultiIndex.from_frame(completed[IDENTITY]))
    some = frame["format"].isin(frame.loc[rows, "format"].unique())
    return frame[rows | ~some]


def late(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the second half of each run: what a format does once weights have settled."""
    last = frame.groupby(["format", "seed"])["step"].transform("max")
    return frame[frame["step"] >= last / 2]


def last(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each run's last step."""
    return frame[frame["step"] == frame.groupby(["format", "seed"])["step"].transform("max")]


def in_order(study: Study, frame: pd.DataFrame) -> list[str]:
    """Return the grid's formats that ``frame`` has rows of, in grid order."""
    present = set(frame["format"].unique())
    return [name for name in study.formats if name in present]


def layer_order(study: Study, frame: pd.DataFrame) -> list[str]:
    """Return the layers that ``frame`` has rows of, in the order in which data flows through the model."""
    present = set(frame["layer"].unique())
    return [name for name in study.monitors["layer"].unique() if name in present]


def weight_format(study: Study, name: str, layers: Iterable[str]) -> tuple[Format, list[str]] | None:
    """Return the format that most of ``layers`` keep their weights in under grid entry ``name``, and those layers.

    A recipe may mix formats; codes of different ones share no axis. ``None`` when no weight is quantized.
    """
    cell = next(cell for cell in study.resolved.values() if cell["format"] == name)
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
    return Format(**cell["formats"][used]), by_format[used]


def labelled(name: str, fmt: Format) -> str:
    """Return the entry's name, with the format behind it where that is another."""
    return name if name == fmt.name else f"{name} ({fmt.name})"
