"""What happens inside the layers: precision by layer and role, where the weights lie, how far a step moves them.

The command ``python -m altgrad.diagnostics what-if`` calls `main`, which draws the SQNR of a run in each format.
"""

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from altgrad.config.recipe import last_matching
from altgrad.formats import Format, from_definition
from altgrad.reporting.compare import Comparison, at_best, in_order, late, of_completed, per_layer
from altgrad.reporting.figures import Look, drawing, in_report, legend, looks, panels, save, tiles
from altgrad.reporting.load import IDENTITY, Study
from altgrad.reporting.optimizer_roles import entry_role

ROLES = {"weight": "weights", "input": "inputs", "grad": "incoming gradients"}
RUNGS, BINADE, COSINE, STALL = "rungs", "rungs_2^", "cosine_adamw", "stall_ratio"
BINS_PER_BINADE = 4  # of the histogram that the diagnosis writes
LOWEST = -16  # binades below the largest weight of a layer, which a scale puts on the format's largest value


@in_report(
    section="layers", order=10,
    alt="Heat map of signal-to-quantization-noise ratio by layer, format and role",
    caption="Precision by layer: mean SQNR over the second half of the run and over seeds (`{optimizer}`). "
    "Brighter is better. {grad}",
)  # fmt: skip
def sqnr(study: Study, comparison: Comparison) -> Figure | None:
    """SQNR of each layer and format, a panel per role: mean over the second half of the run and over seeds."""
    rows = late(per_layer(study.monitors, study, comparison))
    rows = rows[(rows["metric"] == "sqnr_db") & rows["role"].isin(list(ROLES))]
    roles, names = in_order(ROLES, rows["role"]), in_order(study.formats, rows["format"])
    if not roles:
        return None
    names = [name for name in names if name != study.baseline] or names
    layers = in_order(study.monitors["layer"].unique(), rows["layer"])  # as data flows through the model
    table = rows.pivot_table(index="layer", columns=["role", "format"], values="value", sort=False)
    ends = np.floor(table.min().min()), np.ceil(max(table.max().max(), 0.1))
    maps = {role: table[role].reindex(index=layers, columns=names).to_numpy() for role in roles}
    text = len(layers) <= 36 and len(names) <= 9
    figure, _ = _drawn(maps, layers, names, ends, 1.2, "SQNR (dB)", text=text)
    return figure


def _drawn(
    maps: dict[str, np.ndarray], layers: list[str], names: list[str], ends: tuple[float, float], margin: float,
    label: str, *, text: bool = True, rotate: bool | None = None,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Return a figure with a heat map per role, and its axes. ``maps`` has dB by role, shape (layers, names).

    NaN is grey. ``ends`` are the lowest and highest dB of the colours. If ``text``, numbers are written into the map.
    If ``rotate``, names stand upright; by default they do if one has more than five characters.
    """
    figure, axes = panels(1, len(maps), margin + min(0.2 * len(layers), 12), sharey=True)
    (low, high), colors, step = ends, matplotlib.colormaps["cividis"], max(1, -(-len(layers) // 64))
    rotate = max(map(len, names)) > 5 if rotate is None else rotate
    for axis, (role, values) in zip(axes[0], maps.items(), strict=True):
        axis.grid(False)
        axis.set(facecolor="#eeeeee", title=ROLES[role])
        mesh = axis.pcolormesh(
            np.ma.masked_invalid(values), vmin=low, vmax=high, cmap=colors, edgecolors="white", linewidth=0.5
        )
        axis.set_xticks(np.arange(len(names)) + 0.5, names, rotation=90 if rotate else 0)
        axis.set_yticks(np.arange(0, len(layers), step) + 0.5, layers[::step])
        axis.tick_params(length=0, labelsize=7.5)
        axis.invert_yaxis()
        axis.spines[:].set_visible(False)
        for (row, column), value in np.ndenumerate(values):
            if text and np.isfinite(value):
                red, green, blue, _ = colors((value - low) / (high - low))
                color = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
                place = column + 0.5, row + 0.5
                axis.text(*place, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=color)
    figure.colorbar(mesh, ax=axes, label=label, aspect=40, pad=0.01)
    return figure, list(axes[0])


def main(arguments: list[str]) -> None:
    """Draw a table of `altgrad.diagnostics.what_if`, a CSV file, beside it."""
    parser = ArgumentParser("altgrad.reporting.figures.layers", description=main.__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("granularity")
    settings = parser.parse_args(arguments)
    table = pd.read_csv(settings.table, float_precision="round_trip")
    with drawing():
        save(what_if_map(table, settings.granularity), settings.table.parent, settings.table.stem)


def what_if_map(table: pd.DataFrame, granularity: str = "tensor") -> Figure:
    """Return a heat map of the SQNR in ``table`` (see `altgrad.diagnostics.what_if`), rounded to nearest.

    Only rows with ``granularity`` are shown. The highest value of each layer and role is framed, the first of equals.
    """
    rows = table[(table.granularity == granularity) & (table.rounding == "nearest-even")]
    layers, names = list(rows.layer.unique()), list(rows.format.unique())
    values = {
        role: rows[rows.role == role].pivot(index="layer", columns="format", values="sqnr_db")
        .reindex(index=layers, columns=names).replace([np.inf, -np.inf], np.nan).to_numpy(float)
        for role in ROLES
    }  # fmt: skip
    shown = np.concatenate([decibels.ravel() for decibels in values.values()])
    shown = shown[np.isfinite(shown)]
    ends = (np.floor(shown.min()), np.ceil(shown.max()) + 1) if len(shown) else (0, 1)
    figure, axes = _drawn(values, layers, names, ends, 1.5, "SQNR (dB), highest framed", rotate=True)
    for axis, decibels in zip(axes, values.values(), strict=True):
        for row, best in enumerate(np.where(np.isnan(decibels), -np.inf, decibels).argmax(1)):
            axis.add_patch(Rectangle((best, row), 1, 1, fill=False, edgecolor="black", linewidth=1.6, zorder=3))
    return figure


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
    names = [name for name in in_order(study.formats, rows["format"]) if not entry_role(study, name).virtual]
    shown = {name: pair for name in names if (pair := weight_format(study, name, rows["layer"])) is not None}
    if not shown:
        return None
    amax = per_layer(study.monitors, study, comparison)
    amax = amax[(amax["role"] == "weight") & (amax["metric"] == "amax") & (amax["value"] > 0)]
    amax = amax[amax["step"] == amax.groupby(IDENTITY)["step"].transform("max")]
    largest = amax.set_index(["format", "seed", "layer"])["value"]
    titles = [name if name == fmt.name else f"{name} ({fmt.name})" for name, (fmt, _) in shown.items()]
    figure, axes = tiles(titles, 1.9, "binades below the largest weight", "weights (%)")
    for axis, (name, (fmt, layers)) in zip(axes, shown.items(), strict=True):
        shares = relative_histogram(rows[(rows["format"] == name) & rows["layer"].isin(layers)], largest)
        _format_panel(axis, looks(study.formats)[name], fmt, shares)
    return figure


def weight_format(study: Study, name: str, layers: Iterable[str]) -> tuple[Format, list[str]] | None:
    """Return the weight format that most of ``layers`` have in the grid entry ``name``, and the layers that have it.

    Other layers are left out: formats share no axis. The result is ``None`` if no weight has a format.
    """
    every = list(dict.fromkeys([*study.monitors["layer"][study.monitors["role"] == "weight"], *layers]))
    rules = ((rule["layers"], rule.get("last", 1), rule["weight"]) for rule in study.last_rules(name))
    weights = last_matching(every, rules)
    used = {layer: weight["format"] for layer in dict.fromkeys(layers) if (weight := weights.get(layer)) is not None}
    if not used:
        return None
    most = Counter(used.values()).most_common(1)[0][0]
    return from_definition(study.entry(name)["formats"][most]), [layer for layer, fmt in used.items() if fmt == most]


def relative_histogram(rows: pd.DataFrame, amax: pd.Series) -> np.ndarray:
    """Return the share of weights per quarter binade below the layer's largest weight, the mean over layers.

    Entry i covers the binades [LOWEST + i/4, LOWEST + (i+1)/4). A layer's bins are shifted by log2(amax), which is no
    multiple of a quarter, so each is split between two entries. A layer that ``amax`` lacks is left out.
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


def significant_bits(fmt: Format, binades: np.ndarray, largest: float) -> np.ndarray:
    """Return the significant bits of the format at ``largest * 2^binades``, for ``binades`` <= 0.

    They are one more than log2 of the values in the binade. In a float format they are M + 1 in the normal range, and a
    bit less for each binade below it, to 0 where values round to zero.
    """
    magnitude = 2.0 ** np.floor(np.log2(largest) + binades)
    return (np.log2(magnitude / fmt.spacing(magnitude)) + 1).clip(min=0)


def _format_panel(axis: Axes, look: Look, fmt: Format, shares: np.ndarray) -> None:
    edges = LOWEST + np.arange(len(shares) + 1) / BINS_PER_BINADE
    largest = fmt.scale_target
    if fmt.scale_statistic == "rms":  # of these weights, as a share of the largest one
        largest /= np.sqrt((shares / shares.sum() * 4 ** (edges[:-1] + 0.5 / BINS_PER_BINADE)).sum())
    target = np.log2(largest)
    normal = np.log2(fmt.min_normal) - target if fmt.min_normal else 0.0
    subnormal = np.log2(fmt.smallest / 2) - target  # below half of the smallest value lies zero
    axis.axvspan(max(normal, LOWEST), 0, color="#cfe3f3", zorder=0)
    axis.axvspan(max(subnormal, LOWEST), max(normal, LOWEST), color="#e9f2f9", zorder=0)
    axis.stairs(100 * shares, edges, fill=True, color=look.color, alpha=0.85, zorder=2)
    axis.grid(axis="x", visible=False)
    axis.set(xlim=(LOWEST, 0.25), xticks=range(-15, 1, 5))
    bits = axis.twinx()
    significant = significant_bits(fmt, edges[:-1], largest)
    bits.stairs(significant, edges, baseline=None, color="black", linewidth=1.1)
    bits.set_ylim(0, max(9.5, significant.max() + 1))
    bits.tick_params(labelsize=7)
    bits.spines["right"].set_visible(True)
    bits.grid(False)


@in_report(
    section="updates", order=10,
    alt="Code steps that a step moves weights by, against the size of the weight, for each optimizer and format",
    caption="How far a step moves a weight, in code steps (from one representable value to the next), by the binade of "
    "its magnitude: mean over quantized weights, the watched steps of the second half of the run, layers and seeds. A "
    "flat line is the same number of code steps for small weights and large ones.",
)  # fmt: skip
def rungs_by_binade(study: Study, comparison: Comparison) -> Figure | None:
    """Mean code steps per step against the binade of |w|: a panel per optimizer, a line per format."""
    rows = recorded(study, comparison)
    table = by_binade(rows[~rows["format"].isin([name for name in study.formats if entry_role(study, name).virtual])])
    if table.empty:
        return None
    arms = in_order(study.optimizers, table.index.get_level_values("optimizer"))
    names = in_order(study.formats, table.index.get_level_values("format"))
    styles = looks(study.formats)
    figure, axes = tiles(arms, 2.4, "binade of |w|, exponent of two", "code steps per optimizer step")
    for axis, arm in zip(axes, arms, strict=True):
        for name in names:
            if (arm, name) in table.index:
                line = table.loc[(arm, name)]
                line = line[line > 0]
                axis.plot(line.index, line.to_numpy(), **styles[name].line())
        axis.set_yscale("log")
    legend(figure, styles, names)
    return figure


def recorded(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return the recorded updates of quantized weights in the second half of each run, at the best learning rates.

    Diverged runs are left out: the updates of one would dominate a mean.
    """
    rows = study.monitors[study.monitors["role"] == "update"]
    rows = rows[rows["metric"].str.startswith((RUNGS, COSINE, STALL))]
    return late(of_completed(at_best(rows, comparison), study)).dropna(subset="value")


def by_binade(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean code steps by optimizer and format, with a column per binade of |w| (its exponent)."""
    rows = rows[rows["metric"].str.startswith(BINADE)]
    binade = rows["metric"].str.removeprefix(BINADE).astype(int)
    return rows.assign(binade=binade).pivot_table(index=["optimizer", "format"], columns="binade", values="value")
