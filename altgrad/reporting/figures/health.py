"""Precision by layer and role, as a heat map."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import in_order, late, layer_order, per_layer
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import heat_map, panels
from altgrad.reporting.load import Study

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
    roles = [role for role in ROLES if role in set(rows["role"].unique())]
    if not roles:
        return None
    names = [name for name in in_order(study, rows) if name != study.baseline] or in_order(study, rows)
    layers = layer_order(study, rows)
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
