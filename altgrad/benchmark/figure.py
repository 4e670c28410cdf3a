"""Step times of one machine beside bf16: a dot and its quartiles per contestant, a panel per size."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from altgrad.benchmark.record import BASELINE
from altgrad.benchmark.tables import sizes
from altgrad.reporting.figures.style import Look, looks, tiles


def step_times(bench: dict[str, Any]) -> Figure | None:
    """Time of a step over that of a bf16 step of the same round; ``None`` without contestants beside it."""
    steps = [step for step in bench.get("steps", []) if step["name"] != BASELINE]
    if not steps:
        return None
    names = list(dict.fromkeys(step["name"] for step in steps))
    panels = sizes(steps)
    styles = _looks(names)
    figure, axes = tiles(len(panels), 0.65 + 0.24 * len(names), sharex=True, sharey=True)
    for axis, (model, batch) in zip(axes, panels, strict=True):
        own = {step["name"]: step for step in steps if (step["model"], step["batch"]) == (model, batch)}
        for y, name in enumerate(names):
            if name in own:
                step, style = own[name], styles[name].line(linestyle="none", markersize=5.5)
                low, high = step.get("over_bf16_quartiles", [step["over_bf16"]] * 2)
                axis.plot([low, high], [y, y], color=style["color"], linewidth=1.8, solid_capstyle="butt")
                axis.plot(step["over_bf16"], y, **style)
        axis.axvline(1, color="black", linewidth=0.9)
        axis.set_title(f"{model}, batch {batch}")
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    figure.supxlabel("time of a step, bf16 = 1", fontsize=9)
    return figure


def _looks(names: list[str]) -> dict[str, Look]:
    """Return a look per contestant: that of the format that its name begins with."""
    formats = {name: name.split(",")[0] for name in names}
    styles = looks(list(dict.fromkeys(formats.values())))
    return {name: styles[formats[name]] for name in names}
