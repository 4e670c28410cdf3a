"""The result as a picture: what each optimizer changes in each format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import looks, spread_axis, tiles
from altgrad.reporting.load import Study
from altgrad.reporting.results import Result


@in_report(
    section="gains", order=10,
    alt="{noun} of each optimizer minus its reference's, by {entry}",
    caption="Final {noun} minus the reference's in the same {entry}{unit}, with its 95 % interval; {better} of zero is "
    "better, grey is no effect (±{effect}). {beyond}",
)  # fmt: skip
def gains(study: Study, comparison: Comparison) -> Figure | None:
    """Loss of each optimizer minus its reference's, by format, and of that what is specific to the format."""
    table = comparison.gains.dropna(subset="claim") if len(comparison.gains) else comparison.gains
    if table.empty:
        return None
    names = [name for name in study.formats if name in set(table["format"])]
    styles = looks(study.formats)
    arms = list(dict.fromkeys(table["optimizer"]))
    figure, axes = tiles(len(arms), 0.6 + 0.36 * len(names), sharey=True, sharex=True)
    for axis, arm in zip(axes, arms, strict=True):
        own = table[table["optimizer"] == arm]
        for row in own.itertuples():
            style, y = styles[row.format].line(linestyle="none", markersize=7), names.index(row.format)
            _difference(axis, y, row.claim, style)
            if row.beyond is not None:
                _difference(axis, y + 0.3, row.beyond, style | {"markersize": 5, "markerfacecolor": "white"})
        axis.axvspan(-study.measure.smallest_effect, study.measure.smallest_effect, color="#e8e8e8", zorder=0)
        axis.axvline(0, color="black", linewidth=0.9)
        axis.set(title=arm, xlabel=f"{study.measure.delta} against {own['reference'].iloc[0]}")
        spread_axis(axis, "x", pd.Series([row.difference.mean for row in table["claim"]]), narrow=len(arms) > 1)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _difference(axis: Axes, y: float, result: Result, style: dict[str, Any]) -> None:
    mean = result.difference.mean
    if np.isfinite(result.half_width):
        ends = [mean - result.half_width, mean + result.half_width]
        axis.plot(ends, [y, y], color=style["color"], linewidth=1.2)
    axis.plot(mean, y, **style)
