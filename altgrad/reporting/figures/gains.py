"""What each optimizer changes in each format: at the end of the run, and over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, spread_axis, tiles
from altgrad.reporting.load import Study
from altgrad.reporting.results import Result
from altgrad.reporting.roles import is_plain_in
from altgrad.reporting.select import at_best, in_order, of_completed
from altgrad.reporting.statistics import interval


@in_report(
    section="gains", order=10,
    alt="{noun} of each optimizer minus its reference's, by {entry}",
    caption="Final {noun} minus the reference's in the same {entry}{unit}{spread}; {better} of zero is better, grey is "
    "no effect (±{effect}). {beyond}",
)  # fmt: skip
def gains(study: Study, comparison: Comparison) -> Figure | None:
    """Loss of each optimizer minus its reference's, by format, and of that what is specific to the format."""
    table = comparison.gains.dropna(subset="claim")
    if table.empty:
        return None
    names, arms = in_order(study.formats, table["format"]), list(table["optimizer"].unique())
    styles, least = looks(study.formats), study.measure.smallest_effect
    figure, axes = tiles(len(arms), 0.6 + 0.36 * len(names), sharey=True, sharex=True)
    for axis, arm in zip(axes, arms, strict=True):
        own = table[table["optimizer"] == arm]
        for row in own.itertuples():
            style, y = styles[row.format].line(linestyle="none", markersize=7), names.index(row.format)
            _difference(axis, y, row.claim, style)
            if row.beyond is not None:
                _difference(axis, y + 0.3, row.beyond, style | {"markersize": 5, "markerfacecolor": "white"})
        axis.axvspan(-least, least, color="#e8e8e8", zorder=0)
        axis.axvline(0, color="black", linewidth=0.9)
        axis.set(title=arm, xlabel=f"{study.measure.delta} against {own['reference'].iloc[0]}")
        spread_axis(axis, "x", pd.Series([row.difference.mean for row in table["claim"]]), narrow=len(arms) > 1)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    return figure


def _difference(axis: Axes, y: float, result: Result, style: dict[str, Any]) -> None:
    mean, half = result.difference.mean, result.half_width
    if np.isfinite(half):
        axis.plot([mean - half, mean + half], [y, y], color=style["color"], linewidth=1.2)
    axis.plot(mean, y, **style)


@in_report(
    section="gains", order=20,
    alt="{short} of each optimizer minus its reference's by step, for {entries}",
    caption="{short} minus the reference's after the same step with the same seed, mean over seeds{spread}. A learning "
    "rate that falls has fallen all the way at the last step only.",
)  # fmt: skip
def gains_over_run(study: Study, comparison: Comparison) -> Figure | None:
    """Δ loss against the reference by step: a panel per optimizer, a line and its band per format."""
    found = courses(study, comparison)
    if not found:
        return None
    arms, names = (list(dict.fromkeys(run[i] for run in found)) for i in (1, 0))
    styles = looks(study.formats)
    figure, axes = tiles(len(arms), 2.4, sharex=True, sharey=True)
    for axis, arm in zip(axes, arms, strict=True):
        for name in names:
            if (name, arm) in found:
                own = found[name, arm]
                _, low, high = np.array([interval(row) for row in own.to_numpy()]).T  # NaN, undrawn, of one seed
                axis.fill_between(own.index, low, high, color=styles[name].color, alpha=0.12, linewidth=0)
                axis.plot(own.index, own.mean(axis="columns"), **styles[name].line(markevery=max(1, len(own) // 8)))
        axis.axhline(0, color="black", linewidth=0.9)
        axis.set(title=arm, xlabel="optimizer step")
    axes[0].set_ylabel(study.measure.labelled(study.measure.delta))
    legend(figure, styles, names)
    return figure


def courses(study: Study, comparison: Comparison) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the difference of each optimizer to its reference in the same format, with the same seed, at each step.

    Each is at its best learning rate, and only completed runs count: what a diverged one lost would bend a mean.

    Returns:
        By format and optimizer, in the grid's order, a row per step at which both have a validation loss and a column
        per seed, in nats per token. The step before training, where nothing differs, is left out.
    """
    history, value = of_completed(at_best(study.history, comparison), study), study.measure.on_validation
    known = history[history["step"] > 0].dropna(subset=value)
    losses = {
        run: own.pivot(index="step", columns="seed", values=value)
        for run, own in known.groupby(["format", "optimizer"], sort=False)
    }
    found = {
        (entry, arm): (losses[entry, arm] - losses[entry, plain]).dropna(how="all")
        for entry in study.formats for arm, plain in comparison.references.items()
        if (entry, arm) in losses and (entry, plain) in losses and not is_plain_in(study, entry, arm)
    }  # fmt: skip
    return {run: own for run, own in found.items() if len(own)}
