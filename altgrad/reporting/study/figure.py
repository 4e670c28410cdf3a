"""A forest plot of a question's comparisons: the difference in loss of each, and its 95 % interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from altgrad.reporting.figures.style import drawing, panels, save
from altgrad.reporting.results import SMALLEST_EFFECT, Result
from altgrad.reporting.study.answers import Answer

LOW, HIGH, OPEN = "#0072B2", "#D55E00", "#777777"


def draw(answers: Sequence[Answer], folder: Path) -> str | None:
    """Draw the comparisons of losses that have an interval as ``folder/<question>.png``; ``None`` without one."""
    rows = [
        (f"{answer.name}  {found.label}" if i == 0 else found.label, found.result)
        for answer in answers
        for i, found in enumerate(answer.comparisons)
        if found.result is not None and not found.of_f1 and found.result.half_width == found.result.half_width
    ]
    if not rows:
        return None
    name = answers[0].question.name
    with drawing():
        figure, ((axes,),) = panels(1, 1, 0.9 + 0.2 * len(rows), width=7.5)
        axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="#dddddd", linewidth=0)
        axes.axvline(0, color="black", linewidth=0.8)
        for y, (_, result) in enumerate(rows):
            _row(axes, y, result)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(xlabel="Δ loss: method − reference (nats per token); below zero is better, grey is no effect")
        save(figure, folder, name)
    return f"{name}.png"


def _row(axes: Axes, y: int, result: Result) -> None:
    color = (LOW if result.difference.mean < 0 else HIGH) if result.significant else OPEN
    mean, half = result.difference.mean, result.half_width
    axes.errorbar(mean, y, xerr=half, color=color, marker="o", markersize=4, linewidth=1.1)
    axes.plot(mean, y, color=color, marker="o", markersize=4, markerfacecolor=color if result.significant else "white")
