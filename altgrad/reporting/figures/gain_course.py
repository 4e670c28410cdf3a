"""Does it last? What each optimizer changes over the run."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import at_best, of_completed
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, tiles
from altgrad.reporting.load import Study
from altgrad.reporting.statistics import interval


@in_report(
    section="gains", order=20,
    alt="{noun} of each optimizer minus its reference's by step, for {entries}",
    caption="{noun} minus the reference's after the same step with the same seed, mean and 95 % interval over seeds. A "
    "learning rate that falls has fallen all the way at the last step only.",
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
    history = history[history["step"] > 0]
    losses = {
        run: own.pivot(index="step", columns="seed", values=value)
        for run, own in history.dropna(subset=value).groupby(["format", "optimizer"], sort=False)
    }
    found = {
        (entry, arm): (losses[entry, arm] - losses[entry, plain]).dropna(how="all")
        for entry in study.formats
        for arm, plain in comparison.references.items()
        if (entry, arm) in losses and (entry, plain) in losses
    }
    return {run: own for run, own in found.items() if len(own)}
