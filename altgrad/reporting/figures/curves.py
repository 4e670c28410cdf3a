"""Loss over training: the curves, and what is left of them after subtracting the baseline seed by seed."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import Look, legend, looks, panels, spread_axis
from altgrad.reporting.load import DIVERGED, Study
from altgrad.reporting.select import among, at_best, in_order

LOSSES = {"train_loss": "training loss", "val_loss": "validation loss"}


@in_report(
    section="curves", order=10,
    alt="{short} by step for {entries}",
    caption="Thin lines are seeds, thick ones their mean; on the right the second half of the run. A thin line that "
    "ends in a cross is a run that diverged; it enters no mean.",
)  # fmt: skip
def loss_curves(study: Study, comparison: Comparison) -> Figure | None:
    """Training loss of the whole run, and validation loss of its second half, where formats part.

    A study without training losses has the one loss that it has in both.
    """
    history = at_best(study.history, comparison)
    if history.empty:
        return None
    losses = _losses(study, history)
    (whole, of_whole), (half, of_half) = (*losses.items(),)[0], (*losses.items(),)[-1]
    optimizers = in_order(study.optimizers, history["optimizer"])
    names = in_order(study.formats, history["format"])
    styles = looks(study.formats)
    figure, axes = panels(len(optimizers), 2, 0.7 + 2.7 * len(optimizers))
    for row, optimizer in enumerate(optimizers):
        own = history[history["optimizer"] == optimizer]
        finished, lost = _split(study, own)
        training, validation = axes[row]
        _lines(training, finished, whole, styles)
        middle = (finished["step"].min() + finished["step"].max()) / 2
        _lines(validation, finished[finished["step"] >= middle], half, styles)
        if finished.empty:
            validation.text(0.5, 0.5, "no run completed", transform=validation.transAxes, ha="center")
        _end(training, lost, finished, whole, styles)
        training.set(title=f"{optimizer}: {of_whole}", ylabel=study.measure.unit or study.measure.noun)
        validation.set(title=f"{optimizer}: {of_half}")
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    legend(figure, styles, names)
    return figure


@in_report(
    section="curves", order=20,
    alt="{short} minus that of {baseline} by step",
    caption="The same minus {baseline}'s with the same seed at the same step. A seed fixes batches and initial "
    "weights, whose noise cancels. What stays is the {entry} and the chaos of training, whose size the thin lines, one "
    "per seed, show.",
)  # fmt: skip
def loss_differences(study: Study, comparison: Comparison) -> Figure | None:
    """Loss minus the baseline's of the same seed at the same step: the noise of the batches cancels."""
    history, _ = _split(study, at_best(study.history, comparison))
    if study.baseline is None or history.empty:
        return None
    keys, losses = ["optimizer", "seed", "step"], _losses(study, history)
    baseline = history[history["format"] == study.baseline].set_index(keys)[list(losses)]
    others = history[history["format"] != study.baseline].set_index(["format", *keys])[list(losses)]
    differences = (others - baseline.reindex(others.index.droplevel("format")).to_numpy()).reset_index()
    differences = differences.dropna(subset=list(losses), how="all")
    if differences.empty:
        return None
    optimizers = in_order(study.optimizers, differences["optimizer"])
    names = in_order(study.formats, differences["format"])
    styles = looks(study.formats)
    figure, axes = panels(len(optimizers), len(losses), 0.7 + 2.7 * len(optimizers), sharex=True, sharey="row")
    for row, optimizer in enumerate(optimizers):
        own = differences[differences["optimizer"] == optimizer]
        for axis, (loss, label) in zip(axes[row], losses.items(), strict=True):
            _lines(axis, own, loss, styles)
            axis.axhline(0, color="black", linewidth=0.9)
            axis.set_title(f"{optimizer}: {label} minus {study.baseline}'s")
        first = next(iter(losses))
        last = own.dropna(subset=first).groupby("format")[first].last()
        axes[row, 0].set_ylabel(study.measure.unit or study.measure.delta)
        spread_axis(axes[row, 0], "y", last)
    for axis in axes[-1]:
        axis.set_xlabel("optimizer step")
    legend(figure, styles, names)
    return figure


def _losses(study: Study, history: pd.DataFrame) -> dict[str, str]:
    """Return what ``history`` has, by column, and what each is called; one alone is what is compared."""
    measure = study.measure
    shown = LOSSES if measure.in_nats else {"train_loss": LOSSES["train_loss"], measure.on_validation: measure.noun}
    found = {column: label for column, label in shown.items() if history[column].notna().any()}
    return found if len(found) > 1 else {measure.on_validation: measure.noun}


def _split(study: Study, history: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of completed runs and those of diverged ones, which would bend every mean."""
    lost = among(history, study.of_status(DIVERGED))
    return history[~lost], history[lost]


def _lines(axis: Axes, frame: pd.DataFrame, loss: str, styles: dict[str, Look]) -> None:
    """Draw a thin line per seed and a thick one, with marks, for their mean."""
    for name, look in styles.items():
        table = frame[frame["format"] == name].pivot(index="step", columns="seed", values=loss).dropna(how="all")
        if table.empty:
            continue
        for seed in table:
            axis.plot(table.index, table[seed], **look.line(marker="", linewidth=0.7, alpha=0.45))
        mean = table.dropna().mean(axis="columns")
        axis.plot(mean.index, mean, **look.line(markevery=max(1, len(mean) // 8)))


def _end(axis: Axes, lost: pd.DataFrame, finished: pd.DataFrame, loss: str, styles: dict[str, Look]) -> None:
    """Draw diverged runs as thin lines that end in a cross, inside the range of the others."""
    if len(finished):
        axis.set_ylim(axis.get_ylim())
    for (name, _), run in lost.dropna(subset=loss).groupby(["format", "seed"], sort=False):
        axis.plot(run["step"], run[loss], **styles[name].line(marker="", linewidth=1.0))
        top = axis.get_ylim()[1] if len(finished) else run[loss].iloc[-1]
        axis.plot(run["step"].iloc[-1], min(run[loss].iloc[-1], top), marker="x", markersize=9, markeredgewidth=2.2,
                  clip_on=False, color=styles[name].color, zorder=5)  # fmt: skip
