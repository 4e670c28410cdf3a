"""A page with every cell: what it was, how it went and what became of it, at an address of its own, `cells.html#KEY`.

All cells are in one file, as JSON that its script draws: files of their own would take 15 MB for 500 cells.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from altgrad.config.cell import Cell
from altgrad.config.params import validated
from altgrad.config.tasks import ON_TEST
from altgrad.formats import Format, format_names, get_format
from altgrad.metrics import METRICS, Metric
from altgrad.reporting.anomalies import Case, sentences
from altgrad.reporting.html import environment
from altgrad.reporting.load import IDENTITY, MISSING, Study
from altgrad.reporting.wording import as_json, significant

POINTS = 60  # of a curve, about; evaluations are all kept
OUTCOME = ["signature", "outcome_step", "first_nonfinite", "first_rows"]
RESULTS = [
    "val_loss", "val_loss_best", "val_loss_best_step", "train_loss", "perplexity", "clipped_frac", "peak_lr", "steps",
    "tokens", "tokens_per_s", "tflops", "gpu_busy", "step_ms_median", "total_s", "peak_memory_mb",
    "bytes_per_parameter",
]  # fmt: skip


def to_cells_page(study: Study, flags: pd.DataFrame, cases: Sequence[Case]) -> str:
    """Return the page of every cell of ``study``; ``flags`` and ``cases`` are those of the report."""
    # A "<" would end the script element that holds it, whatever stands around it.
    data = json.dumps(contents(study, flags, cases), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return environment().get_template("cells.html.j2").render(
        data=data, measure=study.measure.full, above="minus" if study.measure.higher_is_better else "above"
    )


def contents(study: Study, flags: pd.DataFrame, cases: Sequence[Case]) -> dict[str, Any]:
    """Return what the page shows, as JSON has it: numbers are those of the study's files."""
    histories, summaries = (dict(list(frame.groupby(IDENTITY, sort=False))) for frame in (study.history, study.summary))
    flagged = dict(list(flags.groupby(IDENTITY, sort=False))) if len(flags) else {}
    names = list(study.summary["metric"].unique())
    known = METRICS | study.metrics
    causes = {case.key: " ".join(sentences(case)) for case in cases}
    cells = []
    for key, cell in study.cells.iterrows():
        identity = tuple(cell[name] for name in IDENTITY)
        own: dict[str, Any] = {
            "key": key, **{name: cell[name] for name in IDENTITY}, "status": cell["status"],
            "settings": settings(study.resolved[key]),
        }  # fmt: skip
        if cell["status"] == MISSING:
            cells.append(own | {"reason": cell["reason"]})
            continue
        summary = summaries[identity].set_index("metric")["value"] if identity in summaries else pd.Series(dtype=float)
        own |= {
            "outcome": {name: cell[name] for name in OUTCOME if cell[name] != "" and cell[name] == cell[name]},
            "results": {name: as_json(cell[name]) for name in _results(study)},
            "curve": _curve(histories[identity], study.measure.on_validation),
            "summary": [as_json(summary.get(name), 6) for name in names],
        }
        if identity in flagged:
            own["flags"] = [
                [flag.what, flag.layer, significant(flag.value), f"{flag.limit:g}"]
                for flag in flagged[identity].itertuples()
            ]
        if key in causes:
            own["cause"] = causes[key]
        cells.append(own)
    return {
        "baseline": study.baseline,
        "measure": [getattr(study.measure, name) for name in ("column", "full", "noun", "unit")],
        "metrics": [[name, *_named(name, known.get(name))] for name in names],
        "cells": cells,
    }  # fmt: skip


def _results(study: Study) -> list[str]:
    """Return the columns of a cell's results that any cell has, what is compared first."""
    measured = (name for name in ON_TEST.values() if name in study.cells)
    found = dict.fromkeys([study.measure.column, *measured, *RESULTS])
    return [name for name in found if name == study.measure.column or study.cells[name].notna().any()]


def _curve(history: pd.DataFrame, value: str) -> list[list[float | None]]:
    """Return step, training loss, ``value`` and gradient norm of every evaluation, and of some `POINTS` other steps."""
    every = max(1, math.ceil(len(history) / POINTS))
    kept = (np.arange(len(history)) % every == 0) | history["val_loss"].notna().to_numpy()
    columns = ["step", "train_loss", value, "grad_norm"]
    return [[as_json(value, 6) for value in row] for row in history.loc[kept, columns].to_numpy()]


def _named(name: str, metric: Metric | None) -> tuple[str, str]:
    """Return what a metric is called and its definition, without marks, which the page shows as they are."""
    if metric is None:
        return name, ""
    return f"{metric.title or name.replace('_', ' ')} ({metric.unit})", metric.definition.replace("`", "")


def settings(cell: dict[str, Any]) -> str:
    """Return as YAML what a resolved cell has besides the defaults, its key's parts and formats of the registry."""
    left_out = {"key", *IDENTITY}
    if "monitor" in cell:
        checked = validated(Cell, cell, f"data/grid/{cell['key']}.json")
        found = checked.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
    else:  # another program's, which has no defaults here
        found = {name: value for name, value in cell.items() if name not in left_out}
    known = {name: get_format(name) for name in format_names()}
    found["formats"] = {name: own for name, own in found["formats"].items() if known.get(name) != Format(**own)}
    yaml, text = YAML(typ="safe"), io.StringIO()
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # ruamel.yaml says None
    yaml.dump({name: value for name, value in found.items() if value}, text)
    return text.getvalue()
