"""Figures of what the study's written-down tests decide; `altgrad.reporting.decide` draws them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from altgrad.reporting.figures.style import drawing, heat_map, looks, panels, save
from altgrad.reporting.wording import signed

Interval = tuple[float, float, float]  # estimate, lower and upper end


def draw_matrix(gains: np.ndarray, formats: list[str], folder: Path) -> None:
    """Draw mean gains, a row per geometry and a column per format, the diagonal framed, as ``folder/matrix``."""
    with drawing():
        figure, axes = _table(gains, formats, formats)
        for i in range(len(formats)):
            axes.add_patch(Rectangle((i, i), 1, 1, fill=False, edgecolor="black", linewidth=1.4))
        axes.set(xlabel="trained in", ylabel="steps follow the geometry of")
        save(figure, folder, "matrix")


def draw_own(own: list[Interval], elsewhere: list[Interval], formats: list[str], folder: Path) -> None:
    """Draw what each format's geometry gains in it (filled) and in the others (hollow), as ``folder/own``."""
    with drawing():
        figure, ((axes,),) = panels(1, 1, 0.9 + 0.45 * len(formats), width=6.5)
        for y, look in enumerate(looks(formats).values()):
            for shift, (estimate, low, high), fill in ((-0.14, own[y], look.color), (0.14, elsewhere[y], "white")):
                axes.plot([low, high], [y + shift] * 2, color=look.color, linewidth=1.2)
                axes.plot(estimate, y + shift, **look.line(linestyle="none", markersize=7, markerfacecolor=fill))
        axes.axvline(0, color="black", linewidth=0.9)
        axes.set_yticks(range(len(formats)), [f"{name}'s" for name in formats])
        axes.set_ylim(len(formats) - 0.5, -0.5)
        axes.set(xlabel="gain over AdamW (nats per token)", ylabel="steps follow the geometry")
        marks = [
            Line2D(
                [], [], color="#444444", marker="o", linestyle="none", markersize=7, markerfacecolor=fill, label=said
            )
            for fill, said in (("#444444", "trained in that format"), ("white", "trained in the others"))
        ]
        figure.legend(handles=marks, loc="outside upper center", ncols=2)
        save(figure, folder, "own")


def draw_profile(gains: np.ndarray, slopes: list[float], knees: list[float], folder: Path) -> None:
    """Draw mean gains, a row per slope and a column per knee, as ``folder/profile``."""
    with drawing():
        figure, axes = _table(gains, [f"{slope:g}" for slope in slopes], [f"{knee:g}" for knee in knees])
        axes.set(xlabel="knee (binades below the largest weight)", ylabel="slope")
        save(figure, folder, "profile")


def draw_courses(
    courses: Mapping[str, Mapping[float, Interval]], what: str, folder: Path, name: str, of: str = "gain over AdamW"
) -> None:
    """Draw gains by something that grows by factors, such as training steps, as ``folder/name``: a line per course.

    ``courses`` has for each line its points, ``what`` says what grows, ``of`` what the points are.
    """
    places = sorted({place for points in courses.values() for place in points})
    with drawing():
        figure, ((axes,),) = panels(1, 1, 3.4, width=6.5)
        shifts = np.linspace(-0.06, 0.06, len(courses))
        for shift, (label, look) in zip(shifts, looks(list(courses)).items(), strict=True):
            x = np.array(list(courses[label])) * 2**shift  # so that no interval hides another
            estimate, low, high = np.array(list(courses[label].values())).T
            axes.errorbar(x, estimate, [estimate - low, high - estimate], **look.line(label=label), elinewidth=1.2)
        axes.axhline(0, color="black", linewidth=0.9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:,}" for place in places])
        axes.minorticks_off()
        axes.set(xlabel=what, ylabel=f"{of} (nats per token)")
        figure.legend(loc="outside upper center", ncols=len(courses))
        save(figure, folder, name)


def _table(gains: np.ndarray, rows: list[str], columns: list[str]) -> tuple[Figure, Axes]:
    """Return a heat map of gains with their numbers in it; what is absent (NaN) stays grey."""
    figure, ((axes,),) = panels(1, 1, 0.9 + 0.42 * len(rows), width=6.0)
    text = np.vectorize(lambda value: signed(value, 4), otypes=[object])(gains)
    low, high = min(float(np.nanmin(gains)), 0.0), max(float(np.nanmax(gains)), 0.0)
    mesh = heat_map(axes, gains, rows, columns, low=low, high=high, text=text, rotate=False)
    figure.colorbar(mesh, ax=axes, label="gain (nats per token)", aspect=20, pad=0.02)
    return figure, axes
