"""A grid of several models: the results of each, and the costs of all of them by `altgrad.reporting.cost_law`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.cost_law import Sizes
from altgrad.reporting.cost_law_section import described
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.markdown import Block
from altgrad.reporting.summary import certainty, costs_table, gains_table, headline
from altgrad.reporting.tables import results_table

FIGURE = "cost_by_model"
Sections = dict[str, list[Block | None]]


def sizes_of(studies: Mapping[str, Study], comparisons: Mapping[str, Comparison]) -> Sizes:
    """Return the measured sizes; each run is at the best learning rate of its model."""
    rows = []
    for name, study in studies.items():
        runs, best, arm = comparisons[name].runs, comparisons[name].best_runs, str(comparisons[name].reference)
        base = best.get((str(study.baseline), arm))
        if base is not None and runs.completed(base):
            cells = study.of_status(COMPLETED)
            cells = cells[(cells["format"] == base[0]) & (cells["optimizer"] == arm) & (cells["lr_scale"] == base[2])]
            quantized = [entry for entry in study.formats if entry != base[0] and roles.is_quantized(study, entry)]
            costs = {entry: runs.by_seed({best[entry, arm]: 1, base: -1}) for entry in quantized}
            rows.append((cells["parameters"].max(), cells["tokens"].max(), name, runs.by_seed({base: 1}), costs))
    rows.sort(key=lambda row: row[:2])
    parameters, tokens, losses = (np.array([row[i] for row in rows]) for i in (0, 1, 3))
    by_format = {entry: np.array([row[4][entry] for row in rows]) for entry in (rows[0][4] if rows else ())}
    return Sizes([row[2] for row in rows], parameters, tokens, losses, by_format)


def sections(studies: Mapping[str, Study], comparisons: Mapping[str, Comparison], folder: Path) -> Sections:
    """Return the report's sections on the models of a grid, by title; none for a grid of one model.

    The first has the figure, which is drawn into ``folder``, and the effective parameters or a sentence on what they
    need. One follows for each model but the first, whose results stand elsewhere.
    """
    found: Sections = {}
    for name, study in [*studies.items()][1:]:
        of = study, comparisons[name]
        tables = costs_table(*of), gains_table(*of), results_table(*of)
        found[f"Model {name}"] = [headline(*of), *tables, certainty(*of, chance=None)]
    sizes, study = sizes_of(studies, comparisons), next(iter(studies.values()))
    if not (found and sizes.costs):
        return found
    of_law = described(sizes, study.primary, str(study.baseline), folder, FIGURE)
    return {"Cost by model": of_law, **found}
