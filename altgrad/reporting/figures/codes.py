"""Bit space: which codes and bits of a format its weights use, and how weights sit between codes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from altgrad.formats import Format
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.findings import HELD_VALUES, IDLE_BITS, UNEVEN
from altgrad.reporting.figures.select import in_order, labelled, per_layer, weight_format
from altgrad.reporting.figures.spec import FigureSpec
from altgrad.reporting.figures.style import heat_map, legend, looks, panels, tiles
from altgrad.reporting.load import Study

MISALIGNMENT_BINS = 16


def code_usage(study: Study, comparison: Comparison) -> Figure | None:
    """Share of the weights on each rung, a panel per format; zero is in the middle."""
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "code_usage"]
    names = in_order(study, rows)
    if not names:
        return None
    figure, axes = tiles(len(names), 2.0)
    for axis, name in zip(axes, names, strict=True):
        fmt, layers = _format_of(study, name, rows)
        own = rows[(rows["format"] == name) & rows["layer"].isin(layers)]
        runs, highest = own.groupby(["seed", "layer"]).ngroups, fmt.max_code
        rungs = np.arange(-highest, highest + 1)
        share = (own.groupby("x")["value"].sum() / runs).reindex(rungs, fill_value=0.0)
        axis.stairs(100 * share, np.append(rungs, highest + 1) - 0.5, fill=True, color=looks(study.formats)[name].color)
        axis.axhline(100 / (2 * highest + 1), color="black", linewidth=0.9, linestyle=":")
        axis.set(title=labelled(name, fmt), xlim=(-highest - 1, highest + 1), xticks=[-highest, 0, highest])
        axis.grid(axis="x", visible=False)
    for axis in axes[::3]:
        axis.set_ylabel("weights (%)")
    for axis in axes[-3:]:
        axis.set_xlabel("rung")
    return figure


def bit_activity(study: Study, comparison: Comparison) -> Figure | None:
    """Entropy of each bit of the weight code, format by format, the sign on the left."""
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "bit_activity"]
    if rows.empty:
        return None
    names = in_order(study, rows)
    bits = sorted(rows["x"].unique(), reverse=True)
    table, text, labels = np.full((len(names), len(bits)), np.nan), np.full((len(names), len(bits)), "", object), []
    for row, name in enumerate(names):
        fmt, layers = _format_of(study, name, rows)
        own = rows[(rows["format"] == name) & rows["layer"].isin(layers)].groupby("x")["value"].mean()
        table[row] = own.reindex(bits)
        text[row] = [f"{_field(fmt, bit)}  {own[bit]:.2f}" if bit in own.index else "" for bit in bits]
        labels.append(labelled(name, fmt))
    figure, axes = panels(1, 1, 1.0 + 0.32 * len(names))
    columns = [f"bit {int(bit)}" for bit in bits]
    mesh = heat_map(axes[0, 0], table, labels, columns, low=0.0, high=1.0, text=text, rotate=len(bits) > 8)
    figure.colorbar(mesh, ax=axes, label="entropy (bits)", aspect=20, pad=0.02)
    return figure


def _format_of(study: Study, name: str, rows: pd.DataFrame) -> tuple[Format, list[str]]:
    """Return the format of an entry with rows on codes, which only quantized weights have, and its layers in it."""
    found = weight_format(study, name, rows["layer"])
    assert found is not None
    return found


def _field(fmt: Format, bit: float) -> str:
    """Return the field of a code that the bit belongs to: S, E or M."""
    if bit < fmt.mantissa_bits:
        return "M"
    return "E" if bit < fmt.mantissa_bits + fmt.exponent_bits else "S"


def misalignment(study: Study, comparison: Comparison) -> Figure | None:
    """Density of |w - q(w)| in local spacings, relative to an even spread over [0, 1/2]."""
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "misalignment"]
    names = in_order(study, rows)
    if not names:
        return None
    styles = looks(study.formats)
    figure, axes = panels(1, 1, 3.2)
    low, high = 0.8, 1.2
    for name in names:
        own = rows[rows["format"] == name]
        density = MISALIGNMENT_BINS * own.groupby("x")["value"].sum() / own.groupby(["seed", "layer"]).ngroups
        axes[0, 0].plot(density.index + 0.25 / MISALIGNMENT_BINS, density, **styles[name].line())
        low, high = min(low, density.min() - 0.05), max(high, density.max() + 0.05)
    axes[0, 0].axhline(1, color="black", linewidth=0.9, linestyle=":")
    axes[0, 0].set(xlim=(0, 0.5), ylim=(low, high), xlabel="distance to the rounded value (local spacings)")
    axes[0, 0].set_ylabel("weights, relative to an even spread")
    legend(figure, styles, names)
    return figure


FIGURES = [
    FigureSpec(
        "code_usage",
        code_usage,
        section="weights",
        order=20,
        alt="Share of weights on each code of each format",
        caption="How often each representable value is used at the end of training, from the most negative rung to the "
        "most positive (`{optimizer}`, every layer and seed alike). Dotted: all used alike.",
        findings=HELD_VALUES,
    ),
    FigureSpec(
        "bit_activity",
        bit_activity,
        section="weights",
        order=30,
        alt="Entropy of each bit of the weight codes of each format",
        caption="What each bit of the weight code carries at the end of training, by itself: 1 is a bit set in half of "
        "the weights, 0 one that never changes (`{optimizer}`). S sign, E exponent, M mantissa.",
        findings=IDLE_BITS,
    ),
    FigureSpec(
        "misalignment",
        misalignment,
        section="weights",
        order=40,
        alt="Distribution of the distance of each weight from its rounded value",
        caption="Distance from each weight to its rounded value at the end of training (`{optimizer}`). Weights that "
        "pay no heed to the quantization grid spread evenly between 0 and ½ (dotted).",
        findings=UNEVEN,
    ),
]
