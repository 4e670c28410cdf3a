"""How far updates move weights, in rungs, by the size of the weight."""

from __future__ import annotations

from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, tiles
from altgrad.reporting.load import Study
from altgrad.reporting.updates import by_binade, recorded


@in_report(
    section="updates", order=10,
    alt="Rungs that a step moves weights by, against the size of the weight, for each arm and format",
    caption="How far a step moves a weight, in rungs of its quantization grid, by the binade of its magnitude: "
    "mean over quantized weights, the watched steps of the second half of the run, layers and seeds. A flat line "
    "is a step that is the same in rungs for small weights and large ones.",
)  # fmt: skip
def rungs_by_binade(study: Study, comparison: Comparison) -> Figure | None:
    """Mean rungs per step against the binade of |w|: a panel per arm, a line per format."""
    rows = recorded(study, comparison)
    table = by_binade(rows) if len(rows) else rows
    if table.empty:
        return None
    present = set(table.index.get_level_values("optimizer"))
    arms = [name for name in study.optimizers if name in present]
    names = [name for name in study.formats if name in set(table.index.get_level_values("format"))]
    styles = looks(study.formats)
    figure, axes = tiles(len(arms), 2.4, sharex=True, sharey=True)
    for axis, arm in zip(axes, arms, strict=True):
        for name in names:
            if (arm, name) in table.index:
                line = table.loc[(arm, name)].dropna()
                line = line[line > 0]
                axis.plot(line.index, line.to_numpy(), **styles[name].line())
        axis.set(title=arm, yscale="log", xlabel="binade of |w|, exponent of two")
    axes[0].set_ylabel("rungs per step")
    legend(figure, styles, names)
    return figure
