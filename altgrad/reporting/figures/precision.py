"""Precision by layer and role, as a heat map: of what was trained, and of what each format would make of one cell.

The second is not of the report but of ``python -m altgrad.diagnostics what-if``, which writes the table and calls
`main`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
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
    ends = np.floor(table.min().min()), np.ceil(max(table.max().max(), 0.1))
    maps = {role: table[role].reindex(index=layers, columns=names).to_numpy() for role in roles}
    text = len(layers) <= 36 and len(names) <= 9
    figure, _ = _drawn(maps, layers, names, ends, 1.2, "SQNR (dB)", text=text)
    return figure


def _drawn(
    maps: dict[str, np.ndarray], layers: list[str], names: list[str], ends: tuple[float, float], margin: float,
    label: str, *, text: bool = True, rotate: bool | None = None,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Return a figure with a heat map of dB, layers by names, for each role, and its axes."""
    figure, axes = panels(1, len(maps), margin + min(0.2 * len(layers), 12), sharey=True)
    low, high = ends
    for axis, (role, values) in zip(axes[0], maps.items(), strict=True):
        said = np.vectorize(lambda value: "" if np.isnan(value) else f"{value:.0f}", otypes=[object])(values)
        mesh = heat_map(axis, values, layers, names, low=low, high=high, text=said if text else None, rotate=rotate)
        axis.set_title(ROLES[role])
    figure.colorbar(mesh, ax=axes, label=label, aspect=40, pad=0.01)
    return figure, list(axes[0])


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
    ends = (np.floor(shown.min()), np.ceil(shown.max()) + 1) if len(shown) else (0, 1)
    figure, axes = _drawn(values, layers, names, ends, 1.5, "SQNR (dB), highest framed", rotate=True)
    for axis, found in zip(axes, values.values(), strict=True):
        for row, best in enumerate(np.where(np.isnan(found), -np.inf, found).argmax(1)):
            axis.add_patch(Rectangle((best, row), 1, 1, fill=False, edgecolor="black", linewidth=1.6, zorder=3))
    return figure
