"""The first anomalous tensor of a run that diverged or ended worse: find it, describe it in sentences, draw it.

The metrics of a run are compared with those of healthy runs that are like it. The command ``python -m
altgrad.diagnostics explain`` calls `main`, which explains one run.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.common.console import called
from altgrad.common.errors import UserError, did_you_mean
from altgrad.metrics import METRICS
from altgrad.metrics.first_anomaly import (
    LEAST_PEERS,
    LOSS_THRESHOLD,
    Bands,
    Excursion,
    FirstAnomaly,
    Peers,
    Trace,
    first_anomaly,
    from_binades,
    loss_bands,
    tensor_bands,
    threshold_of,
)
from altgrad.metrics.table import ROLES
from altgrad.reporting.figures import drawing, panels, save
from altgrad.reporting.load import COMPLETED, DIVERGED, IDENTITY, MISSING, Study, load_studies
from altgrad.reporting.markdown import number, plural, significant

# Healthy runs that equal the run in these columns make the bands; the first group with enough of them is used.
GROUPS = (
    (["format", "optimizer", "lr_scale"], "of the same format, arm and learning rate"),
    (["format", "optimizer"], "of the same format and arm, at other learning rates too"),
    (["optimizer"], "of the same arm, in other formats too"),
)
TENSORS = ROLES | {"output": "output", "weight_grad": "weight gradient", "update": "update of the weights"}
RUN, BAND, PEER = "#D55E00", "#0072B2", "#999999"  # colours


@dataclass(frozen=True)
class Case:
    """A run (``key``), how it ended (``ended``, a clause), and its first anomaly.

    ``run`` has the run's measurements. ``peers`` has those of the healthy runs that it is compared with, and ``group``
    says what these runs share with it. ``rows`` is a sentence on the rows of a layer where a divergence began, or "".
    """

    key: str
    ended: str
    anomaly: FirstAnomaly
    run: Trace
    peers: Peers
    group: str
    rows: str


def cases(study: Study) -> Iterator[Case]:
    """Yield the case of every run that diverged or ended worse, in grid order."""
    case_of, worse = _cases(study), ended_worse(study)
    return (case_of(key) for key, status in study.cells["status"].items() if status == DIVERGED or key in worse)


def case(study: Study, key: str) -> Case:
    """Return the case of the run ``key``, even a healthy one. Raises :class:`UserError` if it is unknown or missing."""
    if key not in study.cells.index:
        raise UserError(f"{key}: the grid has no such cell{did_you_mean(key, study.cells.index)}")
    cell = study.cells.loc[key]
    if cell["status"] == MISSING:
        raise UserError(f"{key}: there is no run to explain ({cell['reason']}); run `dvc repro`")
    return _cases(study)(key)


def ended_worse(study: Study) -> dict[str, tuple[float, str]]:
    """Return the completed runs whose validation loss exceeds the baseline's by more than the limit of ``val_gap``.

    The baseline's loss is the median over its seeds, with the run's optimizer at the best learning rate. If no such
    run completed, the loss of the optimizer's best format takes its place.

    Returns:
        By key, the excess in percent and the reference in words, such as "the baseline's".
    """
    completed = study.of_status(COMPLETED)
    medians = completed.groupby(["optimizer", "format", "lr_scale"])["val_loss"].median()
    worse = {}
    for key, cell in completed.iterrows():
        losses = medians[cell["optimizer"]]
        formats = losses.index.get_level_values("format")
        if study.baseline in formats:
            reference, than = losses[formats == study.baseline].min(), "the baseline's"
        else:
            reference = losses.min()
            than = f"that of {formats[losses.argmin()]}, the best of its arm, where no baseline completed"
        gap = 100 * (cell["val_loss"] / reference - 1)
        if METRICS["val_gap"].bound.crossed("", gap):
            worse[key] = gap, than
    return worse


def _cases(study: Study) -> Callable[[str], Case]:
    """Return a function that takes the key of a run and returns its case."""
    worse, empty = ended_worse(study), (study.monitors.iloc[:0], study.history.iloc[:0])
    frames = [dict(list(frame.groupby(IDENTITY, sort=False))) for frame in (study.monitors, study.history)]

    @cache
    def trace(key: str) -> Trace:
        cell = study.cells.loc[key]
        monitors, history = (rows.get(tuple(cell[IDENTITY]), none) for rows, none in zip(frames, empty, strict=True))
        diverged = int(cell["outcome_step"]) if cell["status"] == DIVERGED else None
        return Trace(monitors, history, diverged, cell["first_nonfinite"])

    @cache
    def peers_of(keys: tuple[str, ...]) -> Peers:
        return Peers(trace(key) for key in keys)

    def case_of(key: str) -> Case:
        cell, ended = study.cells.loc[key], "neither diverged nor ended worse"
        if cell["status"] == DIVERGED:
            ended = f"diverged at step {cell['outcome_step']:.0f} ({cell['signature']})"
        elif key in worse:
            percent, than = worse[key]
            ended = f"ended with a validation loss {number(percent, 0)} % above {than}"
        healthy = study.of_status(COMPLETED).drop([*worse, key], errors="ignore")
        groups = [(healthy[(healthy[shared] == cell[shared]).all(axis=1)].index, words) for shared, words in GROUPS]
        alike, group = next((group for group in groups if len(group[0]) >= LEAST_PEERS), groups[-1])
        peers = peers_of(tuple(alike))
        return Case(key, ended, first_anomaly(trace(key), peers), trace(key), peers, group, _rows(cell))

    return case_of


def _rows(cell: pd.Series) -> str:
    if not cell["first_rows"]:
        return ""
    if cell["first_nonfinite"]:
        layer, _, role = cell["first_nonfinite"].rpartition(" ")
        return f"NaN and infinity came first in the {TENSORS.get(role, role)} of {layer}: {cell['first_rows']}."
    return f"Until that was found, none had gone as far beside the rest of their layer as {cell['first_rows']}."


def sentences(case: Case) -> list[str]:
    """Return the case in a few plain sentences."""
    anomaly, first = case.anomaly, case.anomaly.excursion
    told = list(filter(None, [f"{case.key} {case.ended}.", case.rows]))
    left, against = "left its band", f"{plural(anomaly.peers, 'healthy run')} {case.group}"
    if not anomaly.peers:
        left = "was beyond its limit"
        against = f"the limits of the metrics, as fewer than {LEAST_PEERS} healthy runs are like it"
    if first is None and anomaly.loss_step is None:
        return [*told, f"Held against {against}, no tensor {left}."]
    showed = f"The loss showed it at step {anomaly.loss_step}"
    if first is None:
        passes = [f"{step:.0f}" for step in sorted(case.run.monitors["step"].unique())]
        steps = ", ".join(passes if len(passes) <= 6 else [*passes[:6], f"… {passes[-1]}"]) or "none"
        no_tensor = f"Held against {against}, no tensor {left} before the loss did."
        return [*told, no_tensor, f"{showed}; instrumented passes: {steps}."]
    told.append(f"The first that {left} was the {tensor(first)}, at step {first.step}: {_value(first)}.")
    told.append(f"It was held against {against}.")
    if anomaly.lead is None:
        return [*told, "The loss never left its own band."]
    later = f"{plural(anomaly.lead, 'step')} later" if anomaly.lead else "at the same step"
    return [*told, f"{showed}, {later}."]


def tensor(first: Excursion) -> str:
    """Return the metric and tensor that left the band, such as ``sqnr_db of the inputs of blocks.0.mlp.up``."""
    metric = "number of NaN and infinite elements" if first.metric == "nonfinite" else first.metric
    return f"{metric} of the {TENSORS.get(first.role, first.role)} of {first.layer}"


def _value(first: Excursion) -> str:
    unit = METRICS[first.metric].unit
    unit = f" {unit}" if unit in ("dB", "rungs", "ulp") else ""
    if first.metric == "nonfinite":
        return "a healthy tensor has none" if np.isnan(first.value) else f"{first.value:g}, a healthy tensor has none"
    value = "not finite" if not np.isfinite(first.value) else significant(first.value) + unit
    if np.isnan(first.low):
        return f"{value}, beyond the limit of {METRICS[first.metric].bound.of(first.layer):g}"
    return f"{value}, where healthy runs have {significant(first.low)} to {significant(first.high)}{unit}"


def main(arguments: list[str]) -> None:
    """Tell which tensor of a run left its band first, and how long before the loss showed it; draw it."""
    parser = ArgumentParser(f"{called('diagnostics')} explain", description=main.__doc__)
    parser.add_argument("cell", metavar="CELL", help="a finished run, such as E4M3-adamw-0-1")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the pipeline's folder (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("scratch/explain"), help="folder (default %(default)s)")
    settings = parser.parse_args(arguments)
    studies = load_studies(settings.data).values()
    study = next((study for study in studies if settings.cell in study.cells.index), next(iter(studies)))
    explained = case(study, settings.cell)
    print("\n".join(sentences(explained)))
    with drawing():
        save(first_anomaly_figure(explained), settings.out, explained.key)
    print(f"figure: {settings.out / explained.key}.png")


def first_anomaly_figure(case: Case) -> Figure:
    """Return a figure of the anomalous metric by step, with its band and the healthy runs, above the training loss.

    The metric has no panel if no tensor left its band, or if the anomaly is NaN or infinity.
    """
    first, loss_step = case.anomaly.excursion, case.anomaly.loss_step
    curve = None if first is None or first.metric == "nonfinite" else first
    count = 1 if curve is None else 2
    figure, axes = panels(count, 1, 2.6 * count, sharex=True)
    traces = (case.run, *case.peers)
    if curve is not None:
        bands = tensor_bands(case.run, case.peers) if case.anomaly.peers else None
        key = (curve.layer, curve.role, curve.metric)
        series = [_steps_and_values(trace.tensors, key) for trace in traces]
        _draw(axes[0, 0], curve.metric, series, bands, key, threshold_of(curve.role))
        axes[0, 0].set(title=tensor(curve), ylabel=METRICS[curve.metric].unit)
    bands = loss_bands(case.run, case.peers) if case.anomaly.peers else None
    series = [_steps_and_values(trace.losses, "train_loss") for trace in traces]
    _draw(axes[-1, 0], "train_loss", series, bands, "train_loss", LOSS_THRESHOLD)
    axes[-1, 0].set(title="training loss", ylabel="nats per token", xlabel="optimizer step")
    for axis in axes[:, 0]:
        if first is not None:
            axis.axvline(first.step, color=RUN, linewidth=1, label=f"first anomaly, step {first.step}")
        if loss_step is not None:
            axis.axvline(loss_step, color="black", linestyle=":", linewidth=1, label=f"loss, step {loss_step}")
    axes[0, 0].legend(fontsize=7.5)
    figure.suptitle(f"{case.key} {case.ended}", fontsize=9.5)
    return figure


def _steps_and_values(table: pd.DataFrame, key: object) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values (in binades) of the row ``key``; two empty arrays if ``table`` has no such row."""
    if key not in table.index:
        return np.array([]), np.array([])
    row = table.loc[key].replace(np.inf, np.nan).dropna()
    return row.index.to_numpy(dtype="float64"), row.to_numpy()


def _draw(
    axis: Axes, metric: str, series: list[tuple[np.ndarray, np.ndarray]], bands: Bands | None, key: object, reach: float
) -> None:
    """Draw ``series`` (the run, then the healthy runs) over a band that reaches ``reach`` spreads to either side."""
    if bands is not None:
        row = bands.values.index.get_loc(key)
        middle, spread = bands.middle[row], reach * bands.spread[row]
        known, steps = np.isfinite(middle), bands.values.columns.to_numpy(dtype="float64")
        low, high = (from_binades(metric, middle + side * spread)[known] for side in (-1, 1))
        axis.fill_between(steps[known], *sorted((low, high), key=np.sum), color=BAND, alpha=0.15, label="band")
    for steps, values in series[1:]:
        axis.plot(steps, from_binades(metric, values), color=PEER, linewidth=0.8)
    steps, values = series[0]
    axis.plot(steps, from_binades(metric, values), color=RUN, marker="o", label="this run")
    shown = [from_binades(metric, values) for _, values in series if len(values)]
    if metric in METRICS and METRICS[metric].unit in ("1", "ratio", "rungs") and shown and min(map(np.min, shown)) > 0:
        axis.set_yscale("log")
