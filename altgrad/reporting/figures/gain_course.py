"""Does a gain last? What each arm gains over the run."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.plate import Plate
from altgrad.reporting.figures.style import legend, looks, tiles
from altgrad.reporting.gain_course import gain_courses
from altgrad.reporting.load import Study
from altgrad.reporting.paired import interval


def gains_over_run(study: Study, comparison: Comparison) -> Figure | None:
    """Gain over the plain arm by optimizer step: a panel per arm, a line and its band per format."""
    courses = gain_courses(study, comparison)
    if not courses:
        return None
    arms, names = (list(dict.fromkeys(run[i] for run in courses)) for i in (1, 0))
    styles = looks(study.formats)
    figure, axes = tiles(len(arms), 2.4, sharex=True, sharey=True)
    for axis, arm in zip(axes, arms, strict=True):
        for name in names:
            if (name, arm) in courses:
                own = courses[name, arm]
                _, low, high = np.array([interval(row) for row in own.to_numpy()]).T  # NaN, undrawn, of one seed
                axis.fill_between(own.index, low, high, color=styles[name].color, alpha=0.12, linewidth=0)
                axis.plot(own.index, own.mean(axis="columns"), **styles[name].line(markevery=max(1, len(own) // 8)))
        axis.axhline(0, color="black", linewidth=0.9)
        axis.set(title=arm, xlabel="optimizer step")
    axes[0].set_ylabel("gain (nats per token)")
    legend(figure, styles, names)
    return figure


PLATES = [
    Plate(
        "gains_over_run",
        gains_over_run,
        spot="gains",
        order=20,
        alt="Gain of each geometry-aware arm over the plain one by optimizer step, for {entries}",
        caption="Validation loss of the plain arm minus the geometry-aware arm's after the same step with the same "
        "seed, mean and 95 % interval over seeds. A line that rises and falls is a gain that does not last; the "
        "learning rate has fallen all the way at the last step only.",
    ),
]
