"""Precision by layer and role, as a heat map: of what was trained, and of what each format would make of one cell.

The second is not of the report but of ``python -m altgrad.diagnostics what-if``, which writes the table and calls
`main`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import drawing, heat_map, panels, save
from altgrad.reporting.load import Study
from altgrad.reporting.select import in_order, late, per_layer

ROLES = {"weight": "weights", "input": "inputs", "grad": "incoming gradients"}


@in_report(
    section="layers", order=10,
    alt="Heat map of signal-to-quantization-noise ratio by layer, format and role",
    caption="Precision by layer: mean SQNR over the second half of the run and over seeds (`{optimizer}`). "
    "Brighter is better. {grad}",
)  # fmt: skip
def sqnr(study: Study, comparison: Comparison) -> Figure | None:
    """Layer by format, a panel per role: the mean over the second half of the run and over seeds."""
    rows = late(per_layer(study.monitors, study, comparison))
    rows = rows[(rows["metric"] == "sqnr_db") & rows["role"].isin(list(ROLES))]
    roles, names = in_order(ROLES, rows["role"]), in_order(study.formats, rows["format"])
    if not roles:
        return None
    names = [name for name in names if name != study.baseline] or names
    layers = in_order(study.monitors["layer"].unique(), rows["layer"])  # as data flows through the model
    table = rows.pivot_table(index="layer", columns=["role", "format"], values="value", sort=False)
    low, high = np.floor(table.min().min()), np.ceil(max(table.max().max(), 0.1))
    figure, axes = panels(1, len(roles), 1.2 + min(0.2 * len(layers), 12), sharey=True)
    for axis, role in zip(axes[0], roles, strict=True):
        values = table[role].reindex(index=layers, columns=names).to_numpy()
        text = in_cells(values) if len(layers) <= 36 and len(names) <= 9 else None
        mesh = heat_map(axis, values, layers, names, low=low, high=high, text=text)
        axis.set_title(ROLES[role])
    figure.colorbar(mesh, ax=axes, label="SQNR (dB)", aspect=40, pad=0.01)
    return figure


def in_cells(values: np.ndarray) -> np.ndarray:
    """Return what is written into the cells of a heat map of dB."""
    return np.vectorize(lambda value: "" if np.isnan(value) else f"{value:.0f}", otypes=[object])(values)


def main(arguments: list[str]) -> None:
    """Draw a table of `altgrad.diagnostics.what_if`, a CSV file, beside it."""
    parser = ArgumentParser("altgrad.reporting.figures.precision", description=main.__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("granularity")
    settings = parser.parse_args(arguments)
    table = pd.read_csv(settings.table, float_precision="round_trip")
    with drawing():
        save(what_if_map(table, settings.granularity), settings.table.parent, settings.table.stem)


def what_if_map(table: pd.DataFrame, granularity: str = "tensor") -> Figure:
    """SQNR in dB, rounded to nearest, of a table of `altgrad.diagnostics.what_if`; a cell without a number stays grey.

    ``granularity`` is one of the table's. The highest of a layer and role is framed; of equal
    ones the first.
    """
    rows = table[(table.granularity == granularity) & (table.rounding == "nearest-even")]
    layers, names = list(rows.layer.unique()), list(rows.format.unique())
    values = {
        role: rows[rows.role == role].pivot(index="layer", columns="format", values="sqnr_db")
        .reindex(index=layers, columns=names).replace([np.inf, -np.inf], np.nan).to_numpy(float)
        for role in ROLES
    }  # fmt: skip
    shown = np.concatenate([found.ravel() for found in values.values()])
    shown = shown[np.isfinite(shown)]
    low, high = (np.floor(shown.min()), np.ceil(shown.max()) + 1) if len(shown) else (0, 1)
    figure, axes = panels(1, len(ROLES), 1.5 + min(0.2 * len(layers), 12), sharey=True)
    for axis, (role, found) in zip(axes[0], values.items(), strict=True):
        mesh = heat_map(axis, found, layers, names, low=low, high=high, text=in_cells(found), rotate=True)
        for row, best in enumerate(np.where(np.isnan(found), -np.inf, found).argmax(1)):
            axis.add_patch(Rectangle((best, row), 1, 1, fill=False, edgecolor="black", linewidth=1.6, zorder=3))
        axis.set_title(ROLES[role])
    figure.colorbar(mesh, ax=axes, label="SQNR (dB), highest framed", aspect=40, pad=0.01)
    return figure
