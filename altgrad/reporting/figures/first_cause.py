"""A run's first cause: the metric that left its band, and the loss below. Not of the report but of `explain`."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.metrics import METRICS
from altgrad.reporting.causes import Case, tensor
from altgrad.reporting.figures.style import panels
from altgrad.reporting.first_cause import LOSS_THRESHOLD, Bands, from_binades, loss_bands, tensor_bands, threshold_of

RUN, BAND, PEER = "#D55E00", "#0072B2", "#999999"


def first_cause_figure(found: Case) -> Figure:
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
            axis.axvline(first.step, color=RUN, linewidth=1, label=f"first cause, step {first.step}")
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
