"""The figure of a search for the largest stable learning rate; `altgrad.stability` draws it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from altgrad.reporting.figures.style import drawing, looks, panels, save


class Edge(Protocol):
    """Where stability ends, see `altgrad.stability.search.Edge`."""

    @property
    def stable(self) -> int | None: ...
    @property
    def unstable(self) -> int | None: ...


class Ladder(Protocol):
    """The rates that were looked through, see `altgrad.stability.search.Ladder`."""

    @property
    def low(self) -> int: ...
    @property
    def high(self) -> int: ...
    @property
    def factor(self) -> float: ...


def draw_stability(edges: Mapping[tuple[str, str, str], Edge], ladder: Ladder, folder: Path) -> None:
    """Draw the edge of each (variant, format, arm), a panel per variant, as ``folder/stability``."""
    variants = list(dict.fromkeys(variant for variant, _, _ in edges))
    entries = list(dict.fromkeys(entry for _, entry, _ in edges))
    arms = list(dict.fromkeys(arm for _, _, arm in edges))
    rows = [(entry, arm) for entry in entries for arm in arms]
    with drawing():
        figure, grid = panels(len(variants), 1, 0.7 + 0.32 * len(rows), width=7.0)
        for axes, variant in zip(grid[:, 0], variants, strict=True):
            for y, (entry, arm) in enumerate(rows):
                edge, look = edges.get((variant, entry, arm)), looks(entries)[entry]
                if edge is None:
                    continue
                if edge.stable is not None:
                    end = edge.unstable if edge.unstable is not None else edge.stable
                    axes.plot([ladder.low, edge.stable], [y, y], color=look.color, linewidth=1.2)
                    axes.plot([edge.stable, end], [y, y], color=look.color, linewidth=0.9, linestyle=":")
                    marker = ">" if edge.unstable is None else look.marker
                    axes.plot(edge.stable, y, color=look.color, marker=marker, markersize=7)
                if edge.unstable is not None:
                    hollow = {"color": look.color, "markerfacecolor": "white", "markersize": 7}
                    axes.plot(edge.unstable, y, marker=look.marker, **hollow)
            axes.set_yticks(range(len(rows)), [f"{entry} {arm}" for entry, arm in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            ticks = range(ladder.low, ladder.high + 1)
            axes.set_xticks(ticks, [f"{ladder.factor**rung:g}" for rung in ticks])
            axes.set(xlabel="learning rate as a multiple of the arm's own", title=variant)
        save(figure, folder, "stability")
