"""The result as pictures: what each format costs, and what each optimizer changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.select import at_best
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import looks, spread_axis, tiles
from altgrad.reporting.load import COMPLETED, DIVERGED, MISSING, Study
from altgrad.reporting.moderation import Spread
from altgrad.reporting.results import Result
from altgrad.reporting.wording import plural


@in_report(
    section="costs", order=10,
    alt="{noun} of {formats} minus that of {baseline}, with seeds, intervals and noise floor",
    caption="Final {noun} minus {baseline}'s: a small dot per seed, a large one for their mean, a line for the 95 % "
    "interval of each by itself (cut at the frame). Grey: the A/A noise floor, where two equal runs end 19 times "
    "in 20.",
)  # fmt: skip
def final_differences(study: Study, comparison: Comparison) -> Figure | None:
    """Final validation loss minus the baseline's: a dot per seed, the mean, its interval, the noise floor."""
    rows = comparison.best[comparison.best["format"] != study.baseline]
    if study.baseline is None or rows["difference"].isna().all():
        return None
    names = [name for name in study.formats if name != study.baseline]
    optimizers = list(dict.fromkeys(rows["optimizer"]))
    figure, axes = tiles(len(optimizers), 0.6 + 0.36 * len(names), sharey=True, sharex=True)
    styles = looks(study.formats)
    dots = _seed_differences(study, comparison)
    reach = 1.25 * max(dots["difference"].abs().max(), _floor(comparison.noise, rows), 1e-9)
    for axis, optimizer in zip(axes, optimizers, strict=True):
        own = rows[rows["optimizer"] == optimizer].set_index("format")
        _band(axis, comparison.noise, own)
        for y, name in enumerate(names):
            if name in own.index:
                mine = dots[(dots["format"] == name) & (dots["optimizer"] == optimizer)]["difference"]
                _row(axis, y, own.loc[name], mine, styles[name].line(linestyle="none"), comparison.noise)
        axis.set(title=optimizer, xlabel=study.measure.labelled(f"minus {study.baseline}'s"))
        low = min(0.0, dots["difference"].min()) - 0.12 * dots["difference"].abs().median()
        axis.set_xlim(min(low, -1.3 * _floor(comparison.noise, rows)), reach)
        spread_axis(axis, "x", dots["difference"], narrow=len(optimizers) > 1)
    _names_on_y(axes[0], names)
    return figure


@in_report(
    section="gains", order=10,
    alt="{noun} of each optimizer minus its reference's, by {entry}",
    caption="Final {noun} minus the reference's in the same {entry}{unit}, with its 95 % interval; {better} of zero is "
    "better, grey is no effect (±{effect}). {beyond}",
)  # fmt: skip
def gains(study: Study, comparison: Comparison) -> Figure | None:
    """Loss of each optimizer minus its reference's, by format, and of that what is specific to the format."""
    table = comparison.gains.dropna(subset="claim") if len(comparison.gains) else comparison.gains
    if table.empty:
        return None
    names = [name for name in study.formats if name in set(table["format"])]
    styles = looks(study.formats)
    arms = list(dict.fromkeys(table["optimizer"]))
    figure, axes = tiles(len(arms), 0.6 + 0.36 * len(names), sharey=True, sharex=True)
    for axis, arm in zip(axes, arms, strict=True):
        own = table[table["optimizer"] == arm]
        for row in own.itertuples():
            style, y = styles[row.format].line(linestyle="none", markersize=7), names.index(row.format)
            _difference(axis, y, row.claim, style)
            if row.beyond is not None:
                _difference(axis, y + 0.3, row.beyond, style | {"markersize": 5, "markerfacecolor": "white"})
        axis.axvspan(-study.measure.smallest_effect, study.measure.smallest_effect, color="#e8e8e8", zorder=0)
        axis.axvline(0, color="black", linewidth=0.9)
        axis.set(title=arm, xlabel=f"{study.measure.delta} against {own['reference'].iloc[0]}")
        spread_axis(axis, "x", pd.Series([row.difference.mean for row in table["claim"]]), narrow=len(arms) > 1)
    _names_on_y(axes[0], names)
    return figure


def _difference(axis: Axes, y: float, result: Result, style: dict[str, Any]) -> None:
    mean = result.difference.mean
    if np.isfinite(result.half_width):
        ends = [mean - result.half_width, mean + result.half_width]
        axis.plot(ends, [y, y], color=style["color"], linewidth=1.2)
    axis.plot(mean, y, **style)


def _seed_differences(study: Study, comparison: Comparison) -> pd.DataFrame:
    primary = study.measure.column
    completed = at_best(study.cells[study.cells["status"] == COMPLETED].reset_index(), comparison)
    base = completed[completed["format"] == study.baseline].set_index(["optimizer", "seed"])[primary]
    keys = pd.MultiIndex.from_frame(completed[["optimizer", "seed"]])
    completed["difference"] = completed[primary].to_numpy() - base.reindex(keys).to_numpy()
    return completed[completed["format"] != study.baseline].dropna(subset="difference")


def _floor(noise: Spread | None, rows: pd.DataFrame) -> float:
    """Return the widest noise floor among the rows, 0 without one."""
    counts = [row.difference.n for row in rows.itertuples() if row.difference is not None]
    return noise.floor(min(counts)) if noise and counts else 0.0


def _band(axis: Axes, noise: Spread | None, own: pd.DataFrame) -> None:
    floor = _floor(noise, own)
    if floor:
        axis.axvspan(-floor, floor, color="#e8e8e8", zorder=0)
    axis.axvline(0, color="black", linewidth=0.9)


def _row(axis: Axes, y: int, row: pd.Series, seeds: pd.Series, style: dict[str, Any], noise: Spread | None) -> None:
    """Draw one format: seeds as small dots, the mean large, the interval as a line, absences in words."""
    difference = row["difference"]
    lost = [plural(int(row[status]), "seed") + f" {status}" for status in (DIVERGED, MISSING) if row[status]]
    if difference is None:
        axis.text(0, y, "  " + (", ".join(lost) or "no seed in common with the baseline"), va="center", fontsize=8)
        return
    half = noise.half_width(difference) if noise else np.nan
    if np.isfinite(half):
        ends = [difference.mean - half, difference.mean + half]
        axis.plot(ends, [y, y], color=style["color"], linewidth=1.2, zorder=2)
    axis.plot(seeds, [y] * len(seeds), **style | {"markersize": 3.5, "alpha": 0.7})
    axis.plot(difference.mean, y, **style | {"markersize": 8, "markeredgecolor": "white"}, zorder=3)
    if lost:
        axis.annotate(", ".join(lost), (difference.mean, y), xytext=(7, 7), textcoords="offset points", fontsize=7)


def _names_on_y(axis: Axes, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
