"""Where the weights lie: against the range and precision of each format, and against the baseline's."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.formats import Format
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.findings import Findings
from altgrad.reporting.figures.select import in_order, labelled, last, layer_order, per_layer, weight_format
from altgrad.reporting.figures.spec import FigureSpec
from altgrad.reporting.figures.style import Look, heat_map, looks, panels, tiles
from altgrad.reporting.load import Study
from altgrad.reporting.magnitudes import BINS_PER_BINADE, LOWEST, relative_histogram
from altgrad.reporting.statistics import kl_divergence

OTHER_SEED = "other seed"  # heads the column of the baseline against itself


def weight_grid(study: Study, comparison: Comparison) -> Figure | None:
    """Weight magnitudes in binades below the layer's largest, with each format's precision at that magnitude.

    A scale per tensor puts the largest weight of a layer on the format's largest value, so the
    distance from it is the same axis for every format, and only the format's ranges move.
    """
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "log2_magnitude"]
    found = {name: weight_format(study, name, rows["layer"]) for name in in_order(study, rows)}
    shown = {name: pair for name, pair in found.items() if pair is not None}
    if not shown:
        return None
    amax = per_layer(study.monitors, study, comparison)
    amax = last(amax[(amax["role"] == "weight") & (amax["metric"] == "amax") & (amax["value"] > 0)])
    largest = amax.set_index(["format", "seed", "layer"])["value"]
    figure, axes = tiles(len(shown), 2.2, sharex=True, sharey=True)
    for axis, (name, (fmt, layers)) in zip(axes, shown.items(), strict=True):
        shares = relative_histogram(rows[(rows["format"] == name) & rows["layer"].isin(layers)], largest)
        _format_panel(axis, looks(study.formats)[name], fmt, shares)
        axis.set_title(labelled(name, fmt))
    for axis in axes[::3]:
        axis.set_ylabel("weights (%)")
    for axis in axes[-3:]:
        axis.set_xlabel("binades below the largest weight")
    return figure


def weight_kl(study: Study, comparison: Comparison) -> Figure | None:
    """Divergence of each layer's log-magnitude histogram from the baseline's with the same seed."""
    table = divergences(study, comparison)
    if table.empty:
        return None
    layers, names = list(table.index), list(table.columns)
    figure, axes = panels(1, 1, 1.2 + min(0.2 * len(layers), 12))
    values = table.to_numpy()
    text = np.vectorize(lambda v: "" if np.isnan(v) else f"{v:.3f}")(values) if len(layers) <= 36 else None
    mesh = heat_map(
        axes[0, 0], values, layers, names, low=0.0, high=max(float(np.nanmax(values)), 1e-3), text=text, cmap="Blues"
    )
    figure.colorbar(mesh, ax=axes, label="KL divergence (bits)", aspect=40, pad=0.02)
    return figure


def divergences(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return layer x format: KL(format's run || baseline's run) in bits, mean over seeds; empty without a baseline.

    With two seeds or more a last column holds the baseline against itself with the next seed: how far
    two runs come apart that differ in nothing but the seed.
    """
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "log2_magnitude"]
    # All over the same bins, so that none has to be aligned with another.
    bins = rows.pivot_table(index=["format", "seed", "layer"], columns="x", values="value", fill_value=0.0)
    histograms = dict(bins.iterrows())
    layers, seeds = layer_order(study, rows), list(rows["seed"].unique())
    following = dict(zip(seeds, seeds[1:] + seeds[:1], strict=True))
    pairs: dict[str, tuple[str | None, dict[int, int]]] = {
        name: (name, dict(zip(seeds, seeds, strict=True))) for name in in_order(study, rows) if name != study.baseline
    }
    if len(seeds) > 1 and pairs:
        pairs[f"{study.baseline},\n{OTHER_SEED}"] = (study.baseline, following)
    table = pd.DataFrame(np.nan, index=pd.Index(layers), columns=list(pairs))
    for label, (name, partner) in pairs.items():
        for layer in layers:
            found = [
                kl_divergence(histograms[name, seed, layer], histograms[study.baseline, partner[seed], layer])
                for seed in seeds
                if (name, seed, layer) in histograms and (study.baseline, partner[seed], layer) in histograms
            ]
            table.loc[layer, label] = np.mean(found) if found else np.nan
    return table.dropna(axis="columns", how="all") if study.baseline else table.iloc[:0]


def _beyond_a_seed(study: Study, comparison: Comparison) -> bool:
    """Whether some format moves the weights further from the baseline's than another seed does."""
    means = divergences(study, comparison).mean()
    own = means.filter(like=OTHER_SEED)
    return len(own) == 0 or bool((means.drop(own.index) > own.iloc[0]).any())


def significant_bits(fmt: Format, binades: np.ndarray) -> np.ndarray:
    """Return how many significant bits the format has at ``target * 2^binades`` (``binades`` <= 0).

    Within the normal range that is M + 1; each binade further down is a bit less, to 0 where values round to zero.
    """
    exponent = np.floor(np.log2(fmt.scale_target) + binades)
    lowest = fmt.emin - fmt.mantissa_bits  # exponent of the smallest subnormal
    return np.clip(exponent - lowest + 1, 0, fmt.mantissa_bits + 1)


def _format_panel(axis: Axes, look: Look, fmt: Format, shares: np.ndarray) -> None:
    edges = LOWEST + np.arange(len(shares) + 1) / BINS_PER_BINADE
    target = np.log2(fmt.scale_target)
    normal = fmt.emin - target if fmt.min_normal else 0.0
    subnormal = fmt.emin - fmt.mantissa_bits - 1 - target  # half of the smallest: below it lies zero
    axis.axvspan(max(normal, LOWEST), 0, color="#cfe3f3", zorder=0)
    axis.axvspan(max(subnormal, LOWEST), max(normal, LOWEST), color="#e9f2f9", zorder=0)
    axis.stairs(100 * shares, edges, fill=True, color=look.color, alpha=0.85, zorder=2)
    axis.grid(axis="x", visible=False)
    axis.set(xlim=(LOWEST, 0.25), xticks=range(-15, 1, 5))
    bits = axis.twinx()
    bits.stairs(significant_bits(fmt, edges[:-1]), edges, baseline=None, color="black", linewidth=1.1)
    bits.set_ylim(0, max(9.5, fmt.mantissa_bits + 2))
    bits.tick_params(labelsize=7)
    bits.spines["right"].set_visible(True)
    bits.grid(False)
    bits.set_ylabel("significant bits", fontsize=7.5)


FIGURES = [
    FigureSpec(
        "weight_grid",
        weight_grid,
        section="weights",
        order=10,
        alt="Histogram of weight magnitudes against the range and precision of each format",
        caption="Weights at the end of training by magnitude, in binades below the largest of their layer, which "
        "scaling puts on the format's largest value (`{optimizer}`, every layer and seed alike). Dark ground: normal "
        "values; light ground: subnormal ones; white: rounds to zero. Black line: significant bits of the format at "
        "that magnitude.",
    ),
    FigureSpec(
        "weight_kl",
        weight_kl,
        section="weights",
        order=50,
        alt="Heat map of the divergence of each layer's weight distribution from the baseline's",
        caption="How far each layer's distribution of weight magnitudes is from {baseline}'s with the same seed: "
        "Kullback-Leibler divergence over quarter binades at the end of training (`{optimizer}`). A last column, where "
        "there are two seeds, shows how far {baseline} is from itself with another seed.",
        findings=Findings(_beyond_a_seed, "no format moves them further than another seed does"),
    ),
]
