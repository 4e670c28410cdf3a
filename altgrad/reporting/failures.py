"""Which runs fail, and at which rates.

A run **fails** if it diverges, or its loss is higher than the middle between that of an untrained model, ln V for a
vocabulary of V, and the baseline's mean loss at its best rate with the same optimizer; with any, where it has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Column, Table, of_numbers
from altgrad.reporting.figures.select import at_best
from altgrad.reporting.load import COMPLETED, MISSING, Study
from altgrad.reporting.wording import NONE, number, percent_of


def limit_of(vocabulary: int, best: float) -> float:
    """Return the validation loss above which a run fails, where the baseline's best mean is ``best``."""
    return (math.log(vocabulary) + best) / 2


def failed(study: Study) -> pd.Series:
    """Return whether each run failed, by the cell's key; nothing where the baseline has no run that completed."""
    cells = study.cells[study.cells["status"] != MISSING]
    done = cells[(cells["status"] == COMPLETED) & (cells["format"] == study.baseline)]
    best = done.groupby(["optimizer", "lr_scale"])["val_loss"].mean().groupby("optimizer").min()
    if best.empty:
        return pd.Series(dtype=bool)
    limits = {
        arm: limit_of(study.corpus["vocab_size"], best.get(arm, best.min())) for arm in cells["optimizer"].unique()
    }
    above = cells["val_loss"] > cells["optimizer"].map(limits).astype("float64")
    return (cells["status"] != COMPLETED) | above


def failures(study: Study, comparison: Comparison) -> list[Block]:
    """Return the table of runs that fail; nothing where none does."""
    if "vocab_size" not in study.corpus:
        return []
    fails = failed(study)
    return [_table(study, comparison, study.cells.loc[fails.index].assign(fails=fails))] if fails.any() else []


def _table(study: Study, comparison: Comparison, cells: pd.DataFrame) -> Table:
    """Format x arm: how many fail, from which rate on most do, what becomes of gradients and updates at the best."""
    at = at_best(study.monitors, comparison)
    means = at.groupby(["format", "optimizer", "role", "metric"])["value"].mean()

    def share(name: str, arm: str, role: str, metric: str) -> str:
        value = means.get((name, arm, role, metric))
        return NONE if value is None else number(100 * value, 2 if value < 0.1 else 0)

    groups = list(cells.groupby(["format", "optimizer"], sort=False))
    rows = [
        [f"**{name}**", f"`{arm}`", percent_of(int(own["fails"].sum()), len(own)), _lowest(own),
         share(name, arm, "grad", "underflow_frac"), share(name, arm, "update", "stall_ratio")]
        for (name, arm), own in groups
    ]  # fmt: skip
    columns = [
        Column("format", numeric=False), Column("arm", numeric=False), Column("runs that fail"),
        Column("most fail from"), Column("gradients to zero, %"), Column("updates that change no code, %"),
    ]  # fmt: skip
    note = (
        f"A run fails if it diverges, or ends nearer to ln {study.corpus['vocab_size']}, an untrained model's loss, "
        f"than to {study.baseline}'s best. Shares with 95 % intervals (Wilson 1927); the lowest multiple of the rate "
        "at which most seeds fail; elements of incoming gradients that the format rounds to zero, and updates that "
        "leave the weight's code: means over layers, watched steps and seeds at the best rate."
    )
    behind = [of_numbers(columns, {"format": name, "optimizer": arm}) for (name, arm), _ in groups]
    return Table(columns, rows, note, behind)


def _lowest(cells: pd.DataFrame) -> str:
    by_rate = cells.groupby("lr_scale")["fails"].mean()
    beyond: Sequence[float] = sorted(by_rate.index[by_rate > 0.5])
    return f"{beyond[0]:g} times" if beyond else "none"
