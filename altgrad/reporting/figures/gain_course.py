"""Does it last? What each optimizer changes over the run."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, tiles
from altgrad.reporting.gain_course import courses
from altgrad.reporting.load import Study
from altgrad.reporting.paired import interval


@in_report(
    section="gains", order=20,
    alt="Validation loss of each optimizer minus its reference's by step, for {entries}",
    caption="Validation loss minus the reference's after the same step with the same seed, mean and 95 % interval "
    "over seeds; below zero is better. The learning rate has fallen all the way at the last step only.",
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
