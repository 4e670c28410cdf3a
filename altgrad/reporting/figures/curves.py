"""Loss over training: the curves, and what is left of the baseline optimizer's after subtracting the baseline's."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import Look, framed, legend, looks, spread_axis, tiles
from altgrad.reporting.load import DIVERGED, Study
from altgrad.reporting.optimizer_roles import is_virtual
from altgrad.reporting.select import among, at_best, in_order, of_completed, shown_optimizer

UNTRAINED = 0.2  # share of the steps whose loss, an untrained model's, is left out of the range that is shown
BEHIND: dict[str, Any] = {"color": "#b0b0b0", "linewidth": 3.2, "zorder": 1}


@in_report(
    section="curves", order=10,
    alt="{short} by step for {entries}",
    caption="Mean over seeds, a line per optimizer; broad and grey: {baseline} under the baseline optimizer. A line "
    "that ends in a cross is a run that diverged; it enters no mean.",
)  # fmt: skip
def loss_curves(study: Study, comparison: Comparison) -> Figure | None:
    """Training loss by step, a panel per entry; a study without it has the loss that is compared."""
    history = at_best(study.history, comparison)
    if history.empty:
        return None
    measure = study.measure
    trained = measure.in_nats and history["train_loss"].notna().any()
    loss, label = ("train_loss", "training loss") if trained else (measure.on_validation, measure.noun)
    is_lost = among(history, study.of_status(DIVERGED))
    finished, lost = history[~is_lost], history[is_lost]
    means = {run: by_seed(own, loss).dropna().mean(axis=1) for run, own in finished.groupby(["format", "optimizer"])}
    names, arms = in_order(study.formats, history["format"]), in_order(study.optimizers, history["optimizer"])
    styles = looks(study.optimizers)
    figure, axes = tiles(len(names), 1.9, sharex=True, sharey=True)
    late = [own[own.index >= UNTRAINED * own.index.max()] for own in means.values()]
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
        axis.set_title(name)
    figure.supxlabel("optimizer step", fontsize="medium")
    figure.supylabel(measure.labelled(label), fontsize="medium")
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
    """What each entry costs by step: its loss minus the baseline's of the same seed, a panel per entry.

    A control that quantizes nothing is left out: its runs are the baseline's under an optimizer that sees no format.
    """
    history, value = of_completed(at_best(study.history, comparison), study), study.measure.on_validation
    history = history[history["optimizer"] == shown_optimizer(study, comparison)].dropna(subset=value)
    losses = {name: by_seed(own, value) for name, own in history.groupby("format", sort=False)}
    baseline = losses.pop(study.baseline or "", pd.DataFrame())  # without it nothing is left below
    names = [name for name in in_order(study.formats, losses) if not is_virtual(study, name)]
    found = {name: own for name in names if len(own := (losses[name] - baseline).dropna(how="all"))}
    if not found:
        return None
    styles = looks(study.formats)
    figure, axes = tiles(len(found), 1.9, sharex=True, sharey=True)
    for axis, (name, own) in zip(axes, found.items(), strict=True):
        axis.axhline(0, color="black", linewidth=0.9)
        axis.plot(own.index, own, **styles[name].line(marker="", linewidth=0.7, alpha=0.6, linestyle="-"))
        mean = own.dropna().mean(axis="columns")
        axis.plot(mean.index, mean, **styles[name].line(markevery=max(1, len(mean) // 8)))
        axis.set_title(name)
    axes[0].set_ylabel(study.measure.labelled(study.measure.delta))
    spread_axis(axes[0], "y", pd.Series([own.mean(axis="columns").iloc[-1] for own in found.values()]))
    figure.supxlabel("optimizer step", fontsize="medium")
    return figure


def by_seed(history: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return ``value`` of an entry under an optimizer: a row per step that has any, a column per seed."""
    return history.pivot(index="step", columns="seed", values=value).dropna(how="all")


def _end(axis: Axes, lost: pd.DataFrame, loss: str, look: Look) -> None:
    """Draw diverged runs as thin lines that end in a cross, inside the frame."""
    top = axis.get_ylim()[1]
    for _, run in lost.dropna(subset=loss).groupby("seed", sort=False):
        axis.plot(run["step"], run[loss], **look.line(marker="", linewidth=1.0))
        axis.plot(run["step"].iloc[-1], min(run[loss].iloc[-1], top), marker="x", markersize=9, markeredgewidth=2.2,
                  clip_on=False, color=look.color, zorder=5)  # fmt: skip
