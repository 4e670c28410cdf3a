"""The report's numbers: those by which DVC compares experiments, and all of them in a file that DVC does not list."""

from __future__ import annotations

from typing import Any

import pandas as pd

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.statistics import Difference
from altgrad.reporting.summary import ranked
from altgrad.reporting.wording import as_json, shown


def metrics(study: Study, comparison: Comparison) -> dict[str, Any]:
    """Return the numbers of metrics.json, each a column of ``dvc exp show``; null where no run says.

    They are counts of runs, the baseline's loss or metric, and per quantized format Δ and ΔΔ: short names, and the
    report's four decimals. Δ is the difference to the baseline under the baseline optimizer. ΔΔ is the format-specific
    effect of the first optimizer that follows the spacing, where the grid has its control. A grid without its baseline
    has every entry's loss and no Δ.
    """
    plain, arm = comparison.reference or study.optimizers[0], _headline_arm(study, comparison)
    table = comparison.best[comparison.best["optimizer"] == plain].set_index("format")
    entries = study.formats if study.baseline is None else [study.baseline]
    quantized = [entry for entry in study.formats if roles.is_quantized(study, entry)]
    counts = {status: len(study.of_status(status)) for status in (DIVERGED, MISSING)}
    found = {
        study.measure.column.partition("_")[2]: {entry: _rounded(table["primary"][entry]) for entry in entries},
        "Δ": {entry: _mean(table["difference"][entry]) for entry in quantized if entry not in entries},
        "ΔΔ": {
            row.format: _mean(row.beyond and row.beyond.difference) for row in comparison.gains.itertuples()
            if row.optimizer == arm and pd.notna(row.twin) and row.format in quantized
        },
    }  # fmt: skip
    return {"runs": len(study.cells), **counts, **{name: values for name, values in found.items() if values}}


def _headline_arm(study: Study, comparison: Comparison) -> str | None:
    """Return the first optimizer that follows the spacing and is no control, else the first that is no control."""
    arms = {name: study.arm(name) for name in comparison.references}
    found = [name for name, arm in arms.items() if not roles.is_control(arm)]
    return min(found, key=lambda name: not roles.follows_spacing(arms[name]), default=None)


def _mean(difference: Difference | None) -> float | None:
    return None if difference is None else _rounded(difference.mean)


def _rounded(value: float) -> float | None:
    return round(value, 4) + 0.0 if shown(value) else None  # + 0.0: no minus zero


def numbers(study: Study, comparison: Comparison, flags: int) -> dict[str, Any]:
    """Return the numbers of summary.json: numbers, names and nulls only, the same keys whatever completed.

    ``val_loss`` and ``delta_format``, the loss minus the baseline format's, are means over seeds at each optimizer's
    best learning rate; ``delta_optimizer`` is the loss minus the reference optimizer's, ``delta_format_specific`` that
    minus the same without the format; in nats per token, and below zero is better. ``best`` is the report's lowest:
    of all that is quantized, over the seeds that all completed. ``noise_floor`` is the report's too: half the
    95 % interval of a cost, at the median. ``flags`` is how many were raised.
    """
    table = comparison.best
    gaps = [None if row is None else row.mean for row in table["difference"]]
    changes = [None if claim is None else claim.difference.mean for claim in comparison.gains["claim"]]
    beyond = [None if claim is None else claim.difference.mean for claim in comparison.gains["beyond"]]
    return {
        "cells": {
            "total": len(study.cells),
            **{status: len(study.of_status(status)) for status in (COMPLETED, DIVERGED, MISSING)},
        },
        "best": _best(study, comparison),
        study.measure.column: _nested(table, table["primary"]),
        "delta_format": _nested(table, gaps),
        "delta_optimizer": _nested(comparison.gains, changes),
        "delta_format_specific": _nested(comparison.gains, beyond),
        "noise_floor": as_json(comparison.noise_floor),
        "flags": flags,
    }


def _best(study: Study, comparison: Comparison) -> dict[str, Any]:
    runs, column = ranked(study, comparison), study.measure.column
    if not runs:
        return {"format": None, "optimizer": None, column: None}
    name, optimizer, _ = runs[0]
    return {"format": name, "optimizer": optimizer, column: as_json(comparison.runs.of_run(runs[0]).mean())}


def _nested(table: pd.DataFrame, values: Any) -> dict[str, dict[str, float | None]]:
    """Return ``{format: {optimizer: value}}`` in the table's order."""
    nested: dict[str, dict[str, float | None]] = {}
    for name, optimizer, value in zip(table["format"], table["optimizer"], values, strict=True):
        nested.setdefault(name, {})[optimizer] = as_json(value)
    return nested
