"""The report's numbers for ``dvc metrics`` and ``dvc exp show``: one small file of one fixed shape."""

from __future__ import annotations

from typing import Any

import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.summary import ranked
from altgrad.reporting.wording import as_json


def metrics(study: Study, comparison: Comparison, flags: int) -> dict[str, Any]:
    """Return the metrics: numbers, names and nulls only, the same keys whatever completed.

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
