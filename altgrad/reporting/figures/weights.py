"""Where the weights lie: against the range and precision of each format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from altgrad.config.recipe import last_matching
from altgrad.formats import Format
from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import Look, looks, tiles
from altgrad.reporting.load import IDENTITY, Study
from altgrad.reporting.optimizer_roles import is_virtual
from altgrad.reporting.select import in_order, per_layer

BINS_PER_BINADE = 4  # of the histogram that the diagnosis writes
LOWEST = -16  # binades below the largest weight of a layer, which a scale puts on the format's largest value


@in_report(
    section="weights", order=10,
    alt="Histogram of weight magnitudes against the range and precision of each format",
    caption="Weights at the end of training by magnitude, in binades below the largest of their layer, which "
    "scaling puts on the format's largest value (`{optimizer}`, every layer and seed alike). Dark ground: normal "
    "values; light ground: subnormal ones; white: rounds to zero. Black line and right axis: significant bits of the "
    "format at that magnitude.",
)  # fmt: skip
def weight_grid(study: Study, comparison: Comparison) -> Figure | None:
    """Weight magnitudes in binades below the layer's largest, with each format's precision at that magnitude."""
    rows = per_layer(study.diagnosis, study, comparison)
    rows = rows[rows["metric"] == "log2_magnitude"]
    names = [name for name in in_order(study.formats, rows["format"]) if not is_virtual(study, name)]
    shown = {name: pair for name in names if (pair := weight_format(study, name, rows["layer"])) is not None}
    if not shown:
        return None
    amax = per_layer(study.monitors, study, comparison)
    amax = amax[(amax["role"] == "weight") & (amax["metric"] == "amax") & (amax["value"] > 0)]
    amax = amax[amax["step"] == amax.groupby(IDENTITY)["step"].transform("max")]
    largest = amax.set_index(["format", "seed", "layer"])["value"]
    figure, axes = tiles(len(shown), 1.9, sharex=True, sharey=True)
    for axis, (name, (fmt, layers)) in zip(axes, shown.items(), strict=True):
        shares = relative_histogram(rows[(rows["format"] == name) & rows["layer"].isin(layers)], largest)
        _format_panel(axis, looks(study.formats)[name], fmt, shares)
        axis.set_title(labelled(name, fmt))
    figure.supylabel("weights (%)", fontsize="medium")
    figure.supxlabel("binades below the largest weight", fontsize="medium")
    return figure


def weight_format(study: Study, name: str, layers: Iterable[str]) -> tuple[Format, list[str]] | None:
    """Return the format that most of ``layers`` keep their weights in under grid entry ``name``, and those layers.

    A recipe may mix formats; codes of different ones share no axis. ``None`` when no weight is quantized.
    """
    every = list(dict.fromkeys([*study.monitors["layer"][study.monitors["role"] == "weight"], *layers]))
    rules = ((rule["layers"], rule.get("last", 1), rule["weight"]) for rule in study.last_rules(name))
    weights = last_matching(every, rules)
    used = {layer: weight["format"] for layer in dict.fromkeys(layers) if (weight := weights.get(layer)) is not None}
    if not used:
        return None
    most = Counter(used.values()).most_common(1)[0][0]
    return Format(**study.entry(name)["formats"][most]), [layer for layer, fmt in used.items() if fmt == most]


def labelled(name: str, fmt: Format) -> str:
    """Return the entry's name, with the format behind it where that is another."""
    return name if name == fmt.name else f"{name} ({fmt.name})"


def relative_histogram(rows: pd.DataFrame, amax: pd.Series) -> np.ndarray:
    """Return the share of weights per quarter binade below the layer's largest, every layer counting alike.

    Entry i covers [LOWEST + i/4, LOWEST + (i+1)/4). A layer's bins are moved by its own log2(amax),
    which is no multiple of a quarter, so each is split between the two that it then overlaps. A layer
    whose amax was not finite, as after a divergence, is left out.
    """
    total = np.zeros(-LOWEST * BINS_PER_BINADE + 2)
    groups = {key: group for key, group in rows.groupby(["format", "seed", "layer"], sort=False) if key in amax.index}
    for key, group in groups.items():
        position = BINS_PER_BINADE * (group["x"].to_numpy() - np.log2(amax[key]) - LOWEST)
        floor = np.floor(position)
        part, share = position - floor, group["value"].to_numpy()
        index = np.clip(floor.astype(int), 0, len(total) - 2)
        np.add.at(total, index, (1 - part) * share)
        np.add.at(total, index + 1, part * share)
    return total[: -LOWEST * BINS_PER_BINADE] / max(len(groups), 1)


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
