"""Numerical health of every layer and role: precision, overflow and underflow as heat maps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from altgrad.metrics import METRICS
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import in_order, late, layer_order, per_layer
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import heat_map, panels
from altgrad.reporting.load import Study

ROLES = {"weight": "weights", "input": "inputs", "grad": "incoming gradients"}


@dataclass(frozen=True)
class Quantity:
    """A monitored metric: label with unit, decimals in a cell, factor from the stored value, colours.

    A figure of it has a cell of ``least`` or more.
    """

    label: str
    decimals: int
    scale: float = 1.0
    cmap: str = "Blues"
    least: float = 0.0


QUANTITIES = {
    "sqnr_db": Quantity("SQNR (dB)", 0, cmap="cividis"),
    "underflow_frac": Quantity("rounded to zero (%)", 2, 100.0, least=100 * METRICS["underflow_frac"].bound.value),
    "overflow_frac": Quantity("beyond the maximum (%)", 2, 100.0),
}


def _health_map(study: Study, comparison: Comparison, metric: str) -> Figure | None:
    """Layer by format, a panel per role: the mean over the second half of the run and over seeds.

    ``None`` for a share that is zero everywhere at the decimals shown, or nowhere as large as is worth a look.
    """
    quantity = QUANTITIES[metric]
    rows = late(per_layer(study.monitors, study, comparison))
    rows = rows[(rows["metric"] == metric) & rows["role"].isin(list(ROLES))]
    roles = [role for role in ROLES if role in set(rows["role"].unique())]
    if not roles:
        return None
    names = [name for name in in_order(study, rows) if name != study.baseline] or in_order(study, rows)
    layers = layer_order(study, rows)
    table = quantity.scale * rows.pivot_table(index="layer", columns=["role", "format"], values="value", sort=False)
    if table.abs().max().max() < max(0.5 * 10.0**-quantity.decimals, quantity.least):
        return None
    low, high = 0.0, max(table.max().max(), 0.1)
    if metric == "sqnr_db":
        low, high = np.floor(table.min().min()), np.ceil(high)
    decimals = quantity.decimals if high < 10 else min(quantity.decimals, 1)
    written = np.vectorize(partial(_written, decimals=decimals), otypes=[object])
    roomy = len(layers) <= 36 and len(names) <= 9
    figure, axes = panels(1, len(roles), 1.2 + min(0.2 * len(layers), 12), sharey=True)
    for axis, role in zip(axes[0], roles, strict=True):
        values = table[role].reindex(index=layers, columns=names).to_numpy()
        text = written(values) if roomy else None
        mesh = heat_map(axis, values, layers, names, low=low, high=high, text=text, cmap=quantity.cmap)
        axis.set_title(ROLES[role])
    figure.colorbar(mesh, ax=axes, label=quantity.label, aspect=40, pad=0.01)
    return figure


def _written(value: float, decimals: int) -> str:
    """Return a cell's text: nothing for no value, a bare 0 for exactly zero, ``<0.1`` for almost zero."""
    if np.isnan(value) or value == 0:
        return "" if np.isnan(value) else "0"
    least = 10.0**-decimals
    return f"<{least:g}" if abs(value) < least / 2 else f"{value:.{decimals}f}"


@in_report(
    section="layers", order=10,
    alt="Heat map of signal-to-quantization-noise ratio by layer, format and role",
    caption="Precision by layer: mean SQNR over the second half of the run and over seeds (`{optimizer}`). "
    "Brighter is better. {grad}",
)  # fmt: skip
def sqnr(study: Study, comparison: Comparison) -> Figure | None:
    """Precision."""
    return _health_map(study, comparison, "sqnr_db")


@in_report(
    section="layers", order=20,
    alt="Heat map of the share of non-zero elements that rounded to zero, by layer, format and role",
    caption="Share of the non-zero elements that the format rounded to zero (`{optimizer}`). Darker is worse. "
    "{grad}",
)  # fmt: skip
def underflow(study: Study, comparison: Comparison) -> Figure | None:
    """What is rounded to zero."""
    return _health_map(study, comparison, "underflow_frac")


@in_report(
    section="layers", order=30,
    alt="Heat map of the share of elements beyond the format's maximum, by layer, format and role",
    caption="Share of the elements whose scaled magnitude exceeded the format's maximum before clamping "
    "(`{optimizer}`). Darker is worse.",
)  # fmt: skip
def overflow(study: Study, comparison: Comparison) -> Figure | None:
    """What exceeds the format's maximum."""
    return _health_map(study, comparison, "overflow_frac")
