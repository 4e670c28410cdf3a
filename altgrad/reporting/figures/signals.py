"""What flows back through the network: gradients by layer, and over their quantization noise."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from altgrad.metrics import METRICS
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.health import last_values
from altgrad.reporting.figures.select import course, per_layer
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import Look, legend, looks, panels
from altgrad.reporting.load import Study

SNR = "gradient SNR (dB)"
NEAR = 2  # times the level at which a gradient is lost in its quantization noise


@in_report(
    section="signals", order=10,
    alt="Gradient norm, gradient signal-to-noise ratio and cosine by layer",
    caption="Weight gradients by layer, input to output (`{optimizer}`): norm, and agreement of the quantized path "
    "with the float32 path on one batch. Dotted: the level at which the report flags a layer.",
)  # fmt: skip
def gradients(study: Study, comparison: Comparison) -> Figure | None:
    """Norm of the weight gradient, and its agreement with the float32 path, by layer; None where all agree well."""
    norms = last_values(study, comparison, "weight_grad", "l2")
    diagnosis = per_layer(study.diagnosis, study, comparison)
    tables = {"L2 norm of the weight gradient": norms} if norms.size else {}
    for metric, label in (("grad_snr_db", SNR), ("grad_cosine", "cosine with the float32 gradient")):
        rows = diagnosis[diagnosis["metric"] == metric].dropna(subset="value")
        if len(rows):
            tables[label] = rows.pivot_table(index="layer", columns="format", values="value")
    limit = METRICS["grad_snr_db"].bound.value
    if SNR not in tables or not tables[SNR].min().min() < limit:
        return None
    layers = list(dict.fromkeys(name for table in tables.values() for name in table.index))
    names = [name for name in study.formats if any(name in table for table in tables.values())]
    styles = looks(study.formats)
    figure, axes = panels(1, len(tables), 1.3 + min(0.2 * len(layers), 12), sharey=True)
    for axis, (label, table) in zip(axes[0], tables.items(), strict=True):
        _dots(axis, table.reindex(layers), styles, names)
        axis.set_xlabel(label)
        if label.startswith("L2"):
            axis.set_xscale("log")
            low, high = axis.get_xlim()
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
        elif label == SNR:
            axis.axvline(limit, color="black", linewidth=0.9, linestyle=":")
    axes[0, 0].set_yticks(range(len(layers)), layers, fontsize=7.5)
    axes[0, 0].set_ylim(len(layers) - 0.4, -0.6)
    legend(figure, styles, names, linestyle="none")
    return figure


@in_report(
    section="signals", order=15,
    alt="Norm of the weight gradient over that of its quantization noise, and its cosine, by step, for {formats}",
    caption="Norm of the weight gradient over that of its quantization noise on one batch, and the cosine of the "
    "gradient with that noise and without it (`{optimizer}`, mean over layers and seeds) at each snapshot. Dotted: "
    "√3, below which Chmiel et al. 2025 (arXiv 2505.19115) find that quantized training becomes less effective.",
)  # fmt: skip
def gradient_noise(study: Study, comparison: Comparison) -> Figure | None:
    """How far the gradient is above its quantization noise at each snapshot, and how it turns it, mean over layers.

    None where no gradient comes near its noise.
    """
    over, cosine = (course(study, comparison, name) for name in ("gradient_to_noise", "cosine_exact"))
    limit = METRICS["gradient_to_noise"].bound.value
    if len(over.columns) < 2 or not over.min().min() < NEAR * limit:
        return None
    styles = looks(study.formats)
    figure, axes = panels(1, 2, 3.0)
    for axis, table in zip(axes[0], (over, cosine), strict=True):
        for name, values in table.iterrows():
            axis.plot(values.index, values, **styles[name].line())
        axis.set_xlabel("optimizer step")
    size, direction = axes[0]
    size.axhline(limit, color="black", linewidth=0.9, linestyle=":")
    size.set(yscale="log", ylabel="gradient over its noise")
    size.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    size.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    size.yaxis.set_minor_locator(NullLocator())
    direction.set_ylabel("cosine with the exact gradient")
    legend(figure, styles, list(over.index))
    return figure


def _dots(axis: Axes, table: pd.DataFrame, styles: dict[str, Look], names: list[str]) -> None:
    """Draw a row per layer and a mark per format; marks of a row are set apart a little so that none hides another."""
    for position, name in enumerate(names):
        if name in table:
            offset = 0.5 * (position / max(len(names) - 1, 1) - 0.5)
            axis.plot(
                table[name],
                [y + offset for y in range(len(table))],
                **styles[name].line(linestyle="none", markersize=4),
            )
    axis.grid(axis="y", visible=False)
    for y in range(0, len(table), 2):
        axis.axhspan(y - 0.5, y + 0.5, color="#f5f5f5", zorder=0)
