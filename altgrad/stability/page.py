"""A search as a page: a figure, and a table of all sets of settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from altgrad.common.files import replacing, write_text
from altgrad.reporting.figures.style import drawing, looks, panels, save
from altgrad.reporting.markdown import Column, Picture, Table, listed, number, plural, to_markdown, words
from altgrad.stability.search import Edge, Ladder, edge_of

QUESTION = "Up to which learning rate does each format train, and what happens beyond?"


def write(rows: pd.DataFrame, ladder: Ladder, within: float, folder: Path, command: str, trained: str) -> None:
    """Write ``results.csv``, ``STABILITY.md`` and the figure of a search's ``rows`` into ``folder``.

    ``within`` is what a stable run may lose, in nats per token; ``command`` is what made them, ``trained`` says what
    was trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "results.csv") as path:
        rows.to_csv(path, index=False, lineterminator="\n", float_format="%.7g")
    edges = edges_of(rows)
    draw_stability(edges, ladder, folder / "figures")
    seeds = plural(rows["seed"].nunique(), "seed")
    note = (
        f"Learning rates as multiples of the arm's own, in steps of {number(ladder.factor, 0)}, by bisection. Stable: "
        f"all of {seeds} complete and end at most {within:g} nats per token above the same seed's run at the arm's own "
        "rate. Where stability ends is known to a step; that it ends once is assumed."
    )
    figure = Picture(
        "stability", "The largest stable learning rate of each format and arm, as a multiple of the arm's own",
        "Filled: the largest stable rate. Hollow: the lowest that was found not to be. An arrow: the ladder's end.",
    )  # fmt: skip
    page = [
        "# Stability", f"**{QUESTION}**", figure, "## The numbers", table_of(rows, edges, ladder, note),
        "## How to repeat it", f"{trained} `{command}`",
    ]  # fmt: skip
    write_text(folder / "STABILITY.md", to_markdown(page) + "\n")


def edges_of(rows: pd.DataFrame) -> dict[tuple[str, str, str], Edge]:
    """Return the edge of each variant, format and arm."""
    stable = rows.groupby(["variant", "format", "optimizer", "rung"], sort=False)["stable"].all()
    keys = dict.fromkeys(key[:3] for key in stable.index)
    return {key: edge_of({int(rung): bool(value) for rung, value in stable[key].items()}) for key in keys}


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


def table_of(rows: pd.DataFrame, edges: dict[tuple[str, str, str], Edge], ladder: Ladder, note: str) -> Table:
    """Return the table: a row per variant, format and arm."""
    varied = any(variant for variant, *_ in edges)
    lines = []
    for (variant, entry, arm), edge in edges.items():
        own = rows[(rows["variant"] == variant) & (rows["format"] == entry) & (rows["optimizer"] == arm)]
        beyond = own[(own["rung"] == edge.unstable) & ~own["stable"]]
        at_edge = own[own["rung"] == edge.stable]["val_loss"].mean()
        lines.append([
            *([variant] if varied else []), f"**{entry}**", f"`{arm}`", _rate(edge, ladder), number(at_edge, 4),
            _what_happens(beyond),
        ])  # fmt: skip
    columns = [
        *([words("settings")] if varied else []), words("format"), words("arm"), Column("largest stable rate"),
        Column("validation loss there"), words("at the next rate tried"),
    ]  # fmt: skip
    return Table(columns, lines, note)


def _rate(edge: Edge, ladder: Ladder) -> str:
    if edge.stable is None:
        return f"below {number(ladder.scale(ladder.low), 4)}" if edge.unstable is not None else "–"
    scale = f"{ladder.scale(edge.stable):g}"
    return scale if edge.unstable is not None else f"{scale} or more"


def _what_happens(beyond: pd.DataFrame) -> str:
    """Say how the runs of the lowest unstable rung end."""
    if beyond.empty:
        return "–"
    ends = Counter(
        f"diverges ({row.signature})" if row.outcome == "diverged" else "ends higher" for row in beyond.itertuples()
    )
    said = listed([text if len(ends) == 1 else f"{text} in {count}" for text, count in ends.items()])
    higher = beyond[beyond["outcome"] != "diverged"]["val_loss"].mean()
    return said if higher != higher else f"{said}, {number(higher, 4)}"
