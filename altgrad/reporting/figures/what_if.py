"""Which format suits each tensor of a finished cell best: SQNR, layer by format, a panel per role, the best framed.

Not of the report but of ``python -m altgrad.diagnostics what-if``, which writes the table and calls `main`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from altgrad.reporting.figures.health import ROLES, in_cells
from altgrad.reporting.figures.style import drawing, heat_map, panels, save


def main(arguments: list[str]) -> None:
    """Draw a table of `altgrad.diagnostics.what_if`, a CSV file, beside it."""
    parser = ArgumentParser("altgrad.reporting.figures.what_if", description=main.__doc__)
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
