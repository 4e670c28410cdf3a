"""A run's first anomalous tensor: the metric that left its band, and the loss below, drawn and told for one run.

Not of the report but of ``python -m altgrad.diagnostics explain``, which calls `main`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.common.console import called
from altgrad.metrics import METRICS
from altgrad.metrics.first_anomaly import LOSS_THRESHOLD, Bands, from_binades, loss_bands, tensor_bands, threshold_of
from altgrad.reporting.anomalies import Case, case, sentences, tensor
from altgrad.reporting.figures.style import drawing, panels, save
from altgrad.reporting.load import load_study

RUN, BAND, PEER = "#D55E00", "#0072B2", "#999999"


def main(arguments: list[str]) -> None:
    """Tell which tensor of a run left its band first, and how long before the loss showed it; draw it."""
    parser = ArgumentParser(f"{called('diagnostics')} explain", description=main.__doc__)
    parser.add_argument("cell", metavar="CELL", help="a finished run, such as E4M3-adamw-0-1")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the pipeline's folder (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("scratch/explain"), help="folder (default %(default)s)")
    settings = parser.parse_args(arguments)
    found = case(load_study(settings.data), settings.cell)
    print("\n".join(sentences(found)))
    with drawing():
        save(first_anomaly_figure(found), settings.out, found.key)
    print(f"figure: {settings.out / found.key}.png")


def first_anomaly_figure(found: Case) -> Figure:
    """Return the metric over steps with its band, the healthy runs and the moment, above the training loss.

    Without an excursion, or one of NaN that has no curve, it is the loss alone.
    """
    first, loss_step = found.found.excursion, found.found.loss_step
    curve = None if first is None or first.metric == "nonfinite" else first
    count = 1 if curve is None else 2
    figure, axes = panels(count, 1, 2.6 * count, sharex=True)
    if curve is not None:
        bands = tensor_bands(found.run, found.peers) if found.found.peers else None
        key = (curve.layer, curve.role, curve.metric)
        series = [_of(trace.tensors, key) for trace in (found.run, *found.peers)]
        _draw(axes[0, 0], curve.metric, series, bands, key, threshold_of(curve.role))
        axes[0, 0].set(title=tensor(curve), ylabel=METRICS[curve.metric].unit)
    bands = loss_bands(found.run, found.peers) if found.found.peers else None
    series = [_of(trace.losses, "train_loss") for trace in (found.run, *found.peers)]
    _draw(axes[-1, 0], "train_loss", series, bands, "train_loss", LOSS_THRESHOLD)
    axes[-1, 0].set(title="training loss", ylabel="nats per token", xlabel="optimizer step")
    for axis in axes[:, 0]:
        if first is not None:
            axis.axvline(first.step, color=RUN, linewidth=1, label=f"first anomaly, step {first.step}")
        if loss_step is not None:
            axis.axvline(loss_step, color="black", linestyle=":", linewidth=1, label=f"loss, step {loss_step}")
    axes[0, 0].legend(fontsize=7.5)
    figure.suptitle(f"{found.key} {found.ended}", fontsize=9.5)
    return figure


def _of(table: pd.DataFrame, key: object) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values, in binades, of a row; empty where the table has none."""
    if key not in table.index:
        return np.array([]), np.array([])
    row = table.loc[key].replace(np.inf, np.nan).dropna()
    return row.index.to_numpy(dtype="float64"), row.to_numpy()


Series = list[tuple[np.ndarray, np.ndarray]]


def _draw(axis: Axes, metric: str, series: Series, bands: Bands | None, key: object, reach: float) -> None:
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
