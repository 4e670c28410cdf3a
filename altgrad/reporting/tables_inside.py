"""The report's tables of what happened inside the runs: diagnoses at a glance, flags raised, first causes."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from altgrad.reporting.causes import Case, tensor
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Table
from altgrad.reporting.figures.select import per_layer, shown_optimizer
from altgrad.reporting.load import Study
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE, absent, number, plural, significant, whole

LISTED_FLAGS = 400
EXPLAIN = "python -m altgrad.diagnostics explain CELL"


@dataclass(frozen=True)
class Shown:
    """How a summary number of the diagnosis is shown: its head, decimals and factor."""

    head: str
    decimals: int
    factor: float = 1.0


SUMMARIES = {
    "sqnr_db": Shown("weight SQNR, dB", 1),
    "misalignment_mean": Shown("misalignment, ulp", 3),
    "underflow_frac": Shown("weights to zero, %", 2, 100.0),
    "boundary_frac": Shown("weights at the edge, %", 3, 100.0),
    "code_used_frac": Shown("values used, %", 1, 100.0),
    "code_entropy": Shown("code entropy, bit", 2),
    "code_stale_frac": Shown("codes unchanged, %", 1, 100.0),
    "init_distance": Shown("moved from init", 3),
    "init_distance_rungs": Shown("moved, rungs", 1),
    "init_distance_kept": Shown("movement kept", 3),
    "stable_rank": Shown("stable rank", 1),
    "effective_rank": Shown("effective rank", 1),
    "effective_rank_kept": Shown("effective rank kept", 3),
    "grad_snr_db": Shown("gradient SNR, dB", 1),
    "grad_cosine": Shown("gradient cosine", 4),
}


def diagnosis_table(study: Study, comparison: Comparison) -> Table | None:
    """Format x summary metric at the end of the run, mean over seeds; a metric unknown here keeps its own name."""
    rows = per_layer(study.summary, study, comparison).dropna(subset="value")
    if rows.empty:
        return None
    table = rows.pivot_table(index="metric", columns="format", values="value")
    names = [name for name in study.formats if name in table]
    metrics = [m for m in SUMMARIES if m in table.index] + [m for m in table.index if m not in SUMMARIES]
    body = []
    for metric in metrics:
        shown = SUMMARIES.get(metric)
        values = [table.loc[metric, name] for name in names]
        cells = [significant(v) if shown is None else number(shown.factor * v, shown.decimals) for v in values]
        body.append([_head(study, metric) if shown is None else shown.head, *cells])
    optimizer = shown_optimizer(study, comparison)
    note = f"Over all layers at the end of the run, mean over seeds (`{optimizer}`). Definitions are at the end."
    return Table([words("quantity"), *(Column(name) for name in names)], body, note)


def _head(study: Study, metric: str) -> str:
    """Return a metric that is unknown here as its row words it, or by its name."""
    return f"{metric}, {study.metrics[metric].unit}" if metric in study.metrics else metric


def flags_table(flags: pd.DataFrame) -> Table:
    """Flags by kind, format and arm: how many layers, in how many seeds, and the worst."""
    columns = [
        words("what"),
        Column("limit"),
        words("format"),
        words("arm"),
        Column("layers"),
        Column("seeds"),
        Column("worst"),
        words("where"),
    ]
    rows = []
    for (what, name, optimizer), group in flags.groupby(["what", "format", "optimizer"], sort=False):
        above = (group["value"] > group["limit"]).all()
        worst = group.loc[group["value"].idxmax() if above else group["value"].idxmin()]
        layers = {layer for layer in group["layer"] if layer}
        where = worst["layer"] or "whole run"
        if not absent(worst["seed"]):
            where += f", seed {worst['seed']:g}, lr × {worst['lr_scale']:g}"
        limit = f"{'>' if above else '<'} {worst['limit']:g}"
        seeds = NONE if absent(worst["seed"]) else str(group["seed"].nunique())
        count = str(len(layers)) if layers else NONE
        rows.append([what, limit, f"**{name}**", optimizer, count, seeds, significant(worst["value"]), where])
    return Table(columns, rows)


def all_flags_table(flags: pd.DataFrame) -> Table:
    """Every flag, one row each."""
    columns = [words("what"), words("cell"), words("layer"), Column("value"), Column("limit")]
    rows = []
    for flag in flags.head(LISTED_FLAGS).itertuples():
        seed = "all seeds" if absent(flag.seed) else f"seed {flag.seed:g}"
        cell = f"{flag.format} {flag.optimizer}, {seed}, lr × {flag.lr_scale:g}"
        rows.append([flag.what, cell, flag.layer or NONE, significant(flag.value), f"{flag.limit:g}"])
    more = len(flags) - len(rows)
    return Table(columns, rows, f"{plural(more, 'more flag')} not listed." if more else "")


def causes_table(found: list[Case]) -> Table | None:
    """Each run that diverged or ended worse: which tensor left its band first, and when the loss showed it."""
    columns = [
        words("cell"), words("what became of it"), words("first to leave its band"), Column("at step"),
        Column("loss at step"), Column("steps before"), Column("healthy runs"),
    ]  # fmt: skip
    rows = []
    for case in found:
        first = case.found.excursion
        left = [NONE, NONE] if first is None else [tensor(first), whole(first.step)]
        seen = [NONE if step is None else whole(step) for step in (case.found.loss_step, case.found.lead)]
        rows.append([f"`{case.key}`", case.ended, *left, *seen, str(case.found.peers or NONE)])
    note = (
        "Held against the healthy runs of the same arm, or the limits of the metrics where there are too few; a dash "
        f"where no tensor left its band before the loss did. `{EXPLAIN}` tells it in sentences and draws it."
    )
    return Table(columns, rows, note) if rows else None
