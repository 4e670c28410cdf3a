"""What each optimizer changes in each format: at the end of the run, and over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.decision_rule import Result
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import framed, legend, looks, panels, spread_axis, tiles
from altgrad.reporting.load import Study
from altgrad.reporting.optimizer_roles import is_plain_in
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
    styles, least = looks(study.formats), study.measure.smallest_effect
    lines: list[tuple[str, Any]] = []  # from the top: a label and its row, or None for a heading
    for arm, own in table.groupby("optimizer", sort=False):
        against, rows = f"{arm} minus {own['reference'].iloc[0]}", list(own.itertuples())
        several = table["format"].nunique() > 1
        lines += [(against, None), *((row.format, row) for row in rows)] if several else [(against, rows[0])]
    figure, axes = panels(1, 1, 0.7 + 0.22 * len(lines), width=5.2)  # which a phone shows whole
    axis = axes[0, 0]
    for y, (label, row) in enumerate(lines):
        if row is None:
            axis.text(0.01, y, label, transform=axis.get_yaxis_transform(), va="center", fontweight="bold")
        else:
            style = styles[row.format].line(linestyle="none", markersize=6)
            _difference(axis, y, row.claim, style)
            if row.beyond is not None:
                _difference(axis, y + 0.25, row.beyond, style | {"markersize": 4.5, "markerfacecolor": "white"})
    axis.axvspan(-least, least, color="#e8e8e8", zorder=0)
    axis.axvline(0, color="black", linewidth=0.9)
    axis.set_xlabel(study.measure.labelled(study.measure.delta))
    spread_axis(axis, "x", pd.Series([row.difference.mean for row in table["claim"]]))
    axis.set_yticks(range(len(lines)), ["" if row is None else label for label, row in lines])
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    return figure


def _difference(axis: Axes, y: float, result: Result, style: dict[str, Any]) -> None:
    mean, half = result.difference.mean, result.half_width
    if np.isfinite(half):
        axis.plot([mean - half, mean + half], [y, y], color=style["color"], linewidth=1.2)
    axis.plot(mean, y, **style)


@in_report(
    section="gains", order=20,
    alt="{short} of each optimizer minus its reference's by step, for {entries}",
    caption="{short} minus the reference's in the same {entry} after the same step with the same seed, mean over seeds"
    "{spread}; the frame cuts intervals that are wider than all means. A learning rate that falls has fallen all the "
    "way at the last step only.",
)  # fmt: skip
def gains_over_run(study: Study, comparison: Comparison) -> Figure | None:
    """Δ loss against the reference by step: a panel per entry, a line and its interval per optimizer."""
    found = courses(study, comparison)
    if not found:
        return None
    names, arms = in_order(study.formats, (run[0] for run in found)), list(comparison.references)
    styles, shown = looks(study.optimizers), []
    figure, axes = tiles(len(names), 1.9, sharex=True, sharey=True)
    for (name, arm), own in found.items():
        axis, mean = axes[names.index(name)], own.mean(axis="columns")
        _, low, high = np.array([interval(row) for row in own.to_numpy()]).T  # NaN, undrawn, of one seed
        axis.fill_between(own.index, low, high, color=styles[arm].color, alpha=0.2, linewidth=0)
        axis.plot(own.index, mean, **styles[arm].line(markevery=max(1, len(own) // 8)))
        shown += [*mean, low[-1], high[-1], 0]
    for axis, name in zip(axes, names, strict=True):
        axis.axhline(0, color="black", linewidth=0.9)
        axis.set_title(name)
    framed(axes[0], pd.Series(shown))
    figure.supxlabel("optimizer step", fontsize="medium")
    figure.supylabel(study.measure.labelled(study.measure.delta), fontsize="medium")
    legend(figure, styles, in_order(arms, (run[1] for run in found)))
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
