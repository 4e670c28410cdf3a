"""Losses: at the end of a run and over training, by optimizer and format, and against memory."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import (
    BYTES,
    Comparison,
    among,
    at_best,
    in_order,
    memory,
    of_completed,
    shown_optimizer,
)
from altgrad.reporting.figures import Look, framed, in_report, legend, looks, panels, spread_axis, tiles
from altgrad.reporting.load import DIVERGED, Study
from altgrad.reporting.optimizer_roles import entry_role, is_plain_in
from altgrad.reporting.statistics import Result, interval

UNTRAINED = 0.2  # share of the steps, at the start, whose high losses do not set the range that is shown
BEHIND: dict[str, Any] = {"color": "#b0b0b0", "linewidth": 3.2, "zorder": 1}


@in_report(
    section="gains", order=10,
    alt="{noun} of each optimizer minus its reference's, by {entry}",
    caption="Final {noun} minus the reference's in the same {entry}{unit}{spread}; {better} of zero is better, grey is "
    "no effect (±{effect}). {beyond}",
)  # fmt: skip
def gains(study: Study, comparison: Comparison) -> Figure | None:
    """Final loss of each optimizer minus its reference's, by format, and the format-specific effect."""
    table = comparison.gains.dropna(subset="claim")
    if table.empty:
        return None
    styles, least = looks(study.formats), study.primary.smallest_effect
    lines: list[tuple[str, Any]] = []  # from the top: a label and its row, or None for a heading
    for arm, group in table.groupby("optimizer", sort=False):
        against, rows = f"{arm} minus {group['reference'].iloc[0]}", list(group.itertuples())
        several = table["format"].nunique() > 1
        lines += [(against, None), *((row.format, row) for row in rows)] if several else [(against, rows[0])]
    figure, axes = panels(1, 1, 0.7 + 0.22 * len(lines), width=5.2)  # which a phone shows whole
    axis = axes[0, 0]
    for y, (label, row) in enumerate(lines):
        if row is None:
            axis.text(0.01, y, label, transform=axis.get_yaxis_transform(), va="center", fontweight="bold")
        else:
            style = styles[row.format].line(linestyle="none", markersize=6)
            _difference(axis, y, row.claim, style)
            if row.beyond is not None:
                _difference(axis, y + 0.25, row.beyond, style | {"markersize": 4.5, "markerfacecolor": "white"})
    axis.axvspan(-least, least, color="#e8e8e8", zorder=0)
    axis.axvline(0, color="black", linewidth=0.9)
    axis.set_xlabel(study.primary.labelled(study.primary.delta))
    spread_axis(axis, "x", pd.Series([row.difference.mean for row in table["claim"]]))
    axis.set_yticks(range(len(lines)), ["" if row is None else label for label, row in lines])
    axis.set_ylim(len(lines) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    return figure


def _difference(axis: Axes, y: float, result: Result, style: dict[str, Any]) -> None:
    mean, half = result.difference.mean, result.difference.half_width
    if np.isfinite(half):
        axis.plot([mean - half, mean + half], [y, y], color=style["color"], linewidth=1.2)
    axis.plot(mean, y, **style)


@in_report(
    section="costs", order=20,
    alt="Final {noun} of each {entry} and optimizer against the bytes that a parameter takes in training",
    caption="Final {noun}, mean over seeds, against the bytes of a parameter in training: weights, master "
    "weights, gradients and optimizer state as they are allocated, scales included. The line joins those that nothing "
    "of as few bytes is as good as (Pareto front), by their means; whether two differ, the tables say.",
)  # fmt: skip
def loss_against_bytes(study: Study, comparison: Comparison) -> Figure | None:
    """Final loss against bytes per parameter: a mark for each format and optimizer, and the Pareto front."""
    rows = comparison.best.dropna(subset="primary").set_index(["format", "optimizer"])
    rows = rows.join(memory(study, comparison)[BYTES], how="inner").reset_index()
    if rows.empty:
        return None
    figure, axes = panels(1, 1, 4.2)
    axis, styles = axes[0, 0], looks(study.formats)
    best = front(rows[BYTES], rows["primary"], higher_is_better=study.primary.higher_is_better)
    for i, row in rows.iterrows():
        look = styles[row["format"]].line(linestyle="none", markerfacecolor=None if i in best else "white")
        axis.plot(row[BYTES], row["primary"], **look)
    axis.step(rows[BYTES][best], rows["primary"][best], where="post", color="black", linewidth=0.9, zorder=0)
    for i in best:
        axis.annotate(rows["optimizer"][i], (rows[BYTES][i], rows["primary"][i]), (5, 5), textcoords="offset points")
    axis.set(xlabel="bytes per parameter", ylabel=study.primary.labelled(study.primary.full))
    legend(figure, styles, list(dict.fromkeys(rows["format"])), linestyle="none")
    return figure


def front(bytes_kept: pd.Series, values: pd.Series, *, higher_is_better: bool = False) -> list[int]:
    """Return the index labels of the Pareto front by ascending bytes: no run of as few bytes is as good or better."""
    rows = pd.DataFrame({"bytes": bytes_kept, "value": -values if higher_is_better else values})
    rows = rows.sort_values(["bytes", "value"], kind="stable")
    return rows.index[rows["value"] < rows["value"].cummin().shift(fill_value=float("inf"))].tolist()


@in_report(
    section="curves", order=10,
    alt="{short} by step for {entries}",
    caption="Mean over seeds, a line per optimizer; broad and grey: {baseline} under the baseline optimizer. A line "
    "that ends in a cross is a run that diverged; it enters no mean.",
)  # fmt: skip
def loss_curves(study: Study, comparison: Comparison) -> Figure | None:
    """Training loss by step, a panel per entry; the primary metric by step if a study has no training loss."""
    history = at_best(study.history, comparison)
    if history.empty:
        return None
    metric = study.primary
    trained = metric.in_nats and history["train_loss"].notna().any()
    loss, label = ("train_loss", "training loss") if trained else (metric.on_validation, metric.noun)
    is_lost = among(history, study.of_status(DIVERGED))
    finished, lost = history[~is_lost], history[is_lost]
    means = {run: losses.dropna().mean(axis=1) for run, losses in by_run(finished, loss).items()}
    names, arms = in_order(study.formats, history["format"]), in_order(study.optimizers, history["optimizer"])
    styles = looks(study.optimizers)
    figure, axes = tiles(names, 1.9, "optimizer step", metric.labelled(label))
    late = [mean[mean.index >= UNTRAINED * mean.index.max()] for mean in means.values()]
    framed(axes[0], pd.concat(late) if late else lost[loss])
    for axis, name in zip(axes, names, strict=True):
        behind = means.get((study.baseline or "", shown_optimizer(study, comparison)))
        if behind is not None:
            axis.plot(behind.index, behind, **BEHIND)
        for arm in arms:
            if (name, arm) in means:
                axis.plot(means[name, arm].index, means[name, arm], **styles[arm].line(marker=""))
            _end(axis, lost[(lost["format"] == name) & (lost["optimizer"] == arm)], loss, styles[arm])
        if not any(entry == name for entry, _ in means):
            axis.text(0.5, 0.5, "no run completed", transform=axis.transAxes, ha="center")
    legend(figure, styles, arms, marker="")
    return figure


@in_report(
    section="curves", order=20,
    alt="{short} minus that of {baseline} by step, for {entries}",
    caption="{short} minus {baseline}'s with the same seed at the same step, under `{optimizer}`; thin lines are "
    "seeds, thick ones their mean. A seed fixes batches and initial weights, whose noise cancels. What stays is the "
    "{entry} and the chaos of training, whose size the thin lines show.",
)  # fmt: skip
def loss_differences(study: Study, comparison: Comparison) -> Figure | None:
    """Loss minus the baseline's of the same seed by step, a panel per entry.

    An unquantized control is left out: under the baseline optimizer its runs are the baseline's.
    """
    optimizer = shown_optimizer(study, comparison)
    losses = {name: losses for (name, arm), losses in by_step(study, comparison).items() if arm == optimizer}
    baseline = losses.pop(study.baseline or "", pd.DataFrame())  # without it nothing is left below
    names = [name for name in in_order(study.formats, losses) if not entry_role(study, name).virtual]
    costs = {name: cost for name in names if len(cost := (losses[name] - baseline).dropna(how="all"))}
    if not costs:
        return None
    styles = looks(study.formats)
    figure, axes = tiles(list(costs), 1.9, "optimizer step")
    for axis, (name, cost) in zip(axes, costs.items(), strict=True):
        axis.axhline(0, color="black", linewidth=0.9)
        axis.plot(cost.index, cost, **styles[name].line(marker="", linewidth=0.7, alpha=0.6, linestyle="-"))
        mean = cost.dropna().mean(axis="columns")
        axis.plot(mean.index, mean, **styles[name].line(markevery=max(1, len(mean) // 8)))
    axes[0].set_ylabel(study.primary.labelled(study.primary.delta))
    spread_axis(axes[0], "y", pd.Series([cost.mean(axis="columns").iloc[-1] for cost in costs.values()]))
    return figure


def by_run(history: pd.DataFrame, value: str) -> dict[tuple[str, str], pd.DataFrame]:
    """Return ``value`` by (format, optimizer) as frames: a row per step that has any value, and a column per seed."""
    return {
        run: rows.pivot(index="step", columns="seed", values=value).dropna(how="all")
        for run, rows in history.groupby(["format", "optimizer"], sort=False)
    }


def by_step(study: Study, comparison: Comparison) -> dict[tuple[str, str], pd.DataFrame]:
    """Return `by_run` of the primary metric on validation data, for completed runs at their best learning rates."""
    return by_run(of_completed(at_best(study.history, comparison), study), study.primary.on_validation)


def _end(axis: Axes, lost: pd.DataFrame, loss: str, look: Look) -> None:
    """Draw diverged runs as thin lines that end in a cross, inside the frame."""
    top = axis.get_ylim()[1]
    for _, run in lost.dropna(subset=loss).groupby("seed", sort=False):
        axis.plot(run["step"], run[loss], **look.line(marker="", linewidth=1.0))
        axis.plot(run["step"].iloc[-1], min(run[loss].iloc[-1], top), marker="x", markersize=9, markeredgewidth=2.2,
                  clip_on=False, color=look.color, zorder=5)  # fmt: skip


@in_report(
    section="gains", order=20,
    alt="{short} of each optimizer minus its reference's by step, for {entries}",
    caption="{short} minus the reference's in the same {entry} after the same step with the same seed, mean over seeds"
    "{spread}; the frame cuts intervals that are wider than all means. A learning rate that falls has fallen all the "
    "way at the last step only.",
)  # fmt: skip
def gains_over_run(study: Study, comparison: Comparison) -> Figure | None:
    """Δ loss against the reference by step: a panel per entry, a line and its interval per optimizer."""
    differences = courses(study, comparison)
    if not differences:
        return None
    names, arms = in_order(study.formats, (run[0] for run in differences)), list(comparison.references)
    styles, shown = looks(study.optimizers), []
    figure, axes = tiles(names, 1.9, "optimizer step", study.primary.labelled(study.primary.delta))
    for (name, arm), values in differences.items():
        axis, mean = axes[names.index(name)], values.mean(axis="columns")
        _, low, high = np.array([interval(row) for row in values.to_numpy()]).T  # NaN, undrawn, of one seed
        axis.fill_between(values.index, low, high, color=styles[arm].color, alpha=0.2, linewidth=0)
        axis.plot(values.index, mean, **styles[arm].line(markevery=max(1, len(values) // 8)))
        shown += [*mean, low[-1], high[-1], 0]
    for axis in axes:
        axis.axhline(0, color="black", linewidth=0.9)
    framed(axes[0], pd.Series(shown))
    legend(figure, styles, in_order(arms, (run[1] for run in differences)))
    return figure


def courses(study: Study, comparison: Comparison) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the difference of each optimizer to its reference over training, in the same format with the same seed.

    Both are at their best learning rates, and only completed runs count: a diverged one would bend a mean.

    Returns:
        By (format, optimizer), in grid order, a frame in the unit of the primary metric: a row per step above 0 at
        which both are evaluated, and a column per seed.
    """
    losses = {run: values[values.index > 0] for run, values in by_step(study, comparison).items()}
    differences = {
        (entry, arm): (losses[entry, arm] - losses[entry, plain]).dropna(how="all")
        for entry in study.formats for arm, plain in comparison.references.items()
        if (entry, arm) in losses and (entry, plain) in losses and not is_plain_in(study, entry, arm)
    }  # fmt: skip
    return {run: values for run, values in differences.items() if len(values)}
