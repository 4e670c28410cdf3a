"""The study's figures: a forest plot per question, and the two of README.

`draw_costs` shows the cost of each format by its bits per element. `draw_curve` has two panels over the tokens of a
batch. The upper one shows the cost of scales that are rounded down (rule ``floor``). The lower one shows a prediction
without a free parameter: the share of the right tokens' gradients that such scales clamp (`altgrad.formats.clamping`).
The prediction uses the probabilities that a run without quantization gave to its right tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from altgrad.config.tensor_recipe import BLOCK_FORMATS
from altgrad.formats import get_format
from altgrad.formats.clamping import cut_off, right_token
from altgrad.reporting.figures import drawing, panels, save
from altgrad.reporting.statistics import SMALLEST_EFFECT
from altgrad.reporting.study.questions import NATS, Answer, ContrastResult
from altgrad.reporting.study.runs import RunTable

LOW, HIGH, OPEN = "#0072B2", "#D55E00", "#777777"  # colours of the forest plot
SIZE = 6.4, 4.8  # inches, of README's figures; a phone shows them at half of that, so that letters are large
#: By ending of the file's name, colours of page, text, grid lines and two series (Okabe and Ito, one lighter).
SCHEMES = {
    "": ("#ffffff", "#1f2328", "#d8dce0", "#0072B2", "#D55E00"),
    "-dark": ("#0d1117", "#e6edf3", "#343b44", "#56B4E9", "#F0A35E"),
}
COSTS = "costs"
LOWEST, HIGHEST = 4e-4, 0.4  # nats, the ends of the axis of costs, at which a cost beyond them is drawn
GAP = math.log(1.45)  # between the labels of a column, in the logarithm of the cost
PROBABILITIES = "right_tokens.csv"  # columns gradients (their dtype), p: quantiles over a run, at equal distances
POINTS = 400  # the number of points of the predicted curve
SIDE = 1.006  # the factor in tokens between series, so that no interval hides another
MEASURED = "loss with scales rounded down − rounded up, nats per token"
PREDICTED = "predicted: clamped share of the right tokens' gradient, %"
GRADIENT = "E4M3"  # the format of gradients in MXFP8


def draw_forest(answers: Sequence[Answer], folder: Path) -> str | None:
    """Draw the comparisons of losses that have an interval; return the file's name in ``folder``, None without any."""
    rows = [
        (f"{answer.name}  {one.label}" if i == 0 else one.label, one.result)
        for answer in answers
        for i, one in enumerate(answer.comparisons)
        if one.result is not None and one.unit == NATS and one.result.difference.sd > 0
    ]
    if not rows:
        return None
    name = answers[0].question.name
    with drawing():
        figure, ((axes,),) = panels(1, 1, 0.9 + 0.2 * len(rows), width=7.5)
        axes.axvspan(-SMALLEST_EFFECT, SMALLEST_EFFECT, color="#dddddd", linewidth=0)
        axes.axvline(0, color="black", linewidth=0.8)
        for y, (_, result) in enumerate(rows):
            mean, look = result.difference.mean, {"marker": "o", "markersize": 4, "linewidth": 1.1}
            color = (LOW if mean < 0 else HIGH) if result.significant else OPEN
            look |= {"color": color, "markerfacecolor": color if result.significant else "white"}
            axes.errorbar(mean, y, xerr=result.difference.half_width, **look)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(xlabel="Δ loss: method − reference (nats per token)\nbelow zero is better; grey: not significant")
        save(figure, folder, name)
    return f"{name}.png"


class Cost(NamedTuple):
    """The mean cost of a format in nats per token, over ``seeds`` paired seeds; ``bits`` is bits per element."""

    format: str
    bits: float
    tokens: int
    mean: float
    seeds: int
    significant: bool


def costs(answers: Iterable[Answer], runs: RunTable) -> list[Cost]:
    """Return the costs measured by hypotheses with ``front``: for each format and length the one with most seeds."""
    most: dict[tuple[str, int], Cost] = {}
    for one in (one for answer in answers if answer.hypothesis.front for one in answer.comparisons):
        (run,) = (run for run, weight in one.runs.items() if weight > 0)
        if (result := one.result) is not None:
            tokens, difference = int(runs.of_experiment(run.experiment)["tokens"].max()), result.difference
            bits = bits_per_element(run.format)
            cost = Cost(run.format, bits, tokens, difference.mean, difference.n, result.significant)
            known = most.setdefault((run.format, tokens), cost)
            most[run.format, tokens] = max(known, cost, key=lambda one: one.seeds)
    return sorted(most.values(), key=lambda cost: (cost.tokens, cost.bits, cost.mean))


def bits_per_element(name: str) -> float:
    """Return the bits per element of a tensor in the format ``name``, with its share of a block's scale, if any."""
    settings = BLOCK_FORMATS.get(name, {"format": name})
    bits = get_format(settings["format"]).bits
    return bits + get_format(settings["scale"]).bits / settings["block"] if "block" in settings else bits


def draw_costs(shown: list[Cost], folder: Path) -> None:
    """Draw the costs as ``folder/costs.svg`` and ``costs-dark.svg``, and as PNG."""
    columns = sorted({cost.bits for cost in shown})
    lengths = sorted({cost.tokens for cost in shown})
    for ending, (page, ink, lines, *colours) in SCHEMES.items():
        with _coloured(page, ink, {"font.size": 12, "axes.grid": False}):
            figure, ((axes,),) = panels(1, 1, SIZE[1], width=SIZE[0])
            axes.set_facecolor(page)
            axes.grid(axis="y", color=lines)
            for length, colour, side in zip(lengths, colours, (-1, 1), strict=False):
                for place, bits in enumerate(columns):
                    column = [cost for cost in shown if (cost.tokens, cost.bits) == (length, bits)]
                    means = [min(max(cost.mean, LOWEST), HIGHEST) for cost in column]
                    heights = apart([math.log(mean) for mean in means])
                    for cost, mean, height in zip(column, means, heights, strict=True):
                        fill = colour if cost.significant else page
                        x = place + side * 0.06
                        axes.plot(x, mean, "o", color=colour, markerfacecolor=fill, markersize=6.5, clip_on=False)
                        axes.text(x + side * 0.1, math.exp(height), cost.format, color=colour, fontsize=11,
                                  ha="right" if side < 0 else "left", va="center")  # fmt: skip
                axes.plot([], [], "o", color=colour, label=f"after {length / 1e6:.1f} M tokens")
            axes.set_yscale("log")
            axes.set_ylim(LOWEST, HIGHEST)
            axes.set_yticks([0.001, 0.01, 0.1], ["0.001", "0.01", "0.1"])
            axes.minorticks_off()
            axes.set_xlim(-0.75, len(columns) - 0.1)
            axes.set_xticks(range(len(columns)), [f"{bits:g}" for bits in columns])
            axes.set_xlabel("bits per element, with its share of a block's scale")
            axes.set_title("loss above bf16, nats per token", fontsize=12, fontweight="normal")
            axes.legend(loc="upper right", labelcolor="linecolor", handlelength=0.6, fontsize=12)
            save(figure, folder, f"{COSTS}{ending}")


def apart(heights: list[float]) -> list[float]:
    """Return the ascending ``heights``, moved apart until neighbours differ by about `GAP` or more."""
    moved = list(heights)
    for _ in range(200):
        for i in range(len(moved) - 1):
            lack = max(0.0, GAP - (moved[i + 1] - moved[i])) / 2
            moved[i], moved[i + 1] = moved[i] - lack, moved[i + 1] + lack
    return moved


def clamped_share(tokens: int, probabilities: Sequence[float], *, bf16: bool) -> float:
    """Return the share of the right tokens' summed gradients that ``floor`` scales clamp, given ``probabilities``."""
    sizes = [right_token(tokens, p, bf16=bf16) for p in probabilities]
    return float(sum(size * cut_off(size, GRADIENT, "floor") for size in sizes) / sum(sizes))


def draw_curve(answers: Sequence[Answer], dtypes: Mapping[str, str], study: Path) -> str:
    """Draw ``figures/<question>.svg``, ``-dark.svg`` and PNG of both below ``study``; return the file's name.

    ``dtypes`` has the dtype of gradients, float32 or bf16, by hypothesis. A comparison's label is its number of tokens.
    """
    series = {dtypes[answer.name]: answer.comparisons for answer in answers if answer.name in dtypes}
    probabilities = pd.read_csv(study / "results" / PROBABILITIES).groupby("gradients")["p"].apply(list)
    batches = sorted({int(one.label) for comparisons in series.values() for one in comparisons})
    ends = batches[0] / 1.04, batches[-1] * 1.06
    steps = np.unique(np.geomspace(*ends, POINTS).round().astype(int)).tolist()

    def predicted(dtype: str, tokens: Sequence[int]) -> list[float]:
        return [100 * clamped_share(count, probabilities[dtype], bf16=dtype == "bf16") for count in tokens]

    shares = {dtype: (predicted(dtype, steps), predicted(dtype, batches)) for dtype in series}
    name = answers[0].question.name
    for ending, (page, ink, lines, *colours) in SCHEMES.items():
        with _coloured(page, ink, {"font.size": 11, "grid.color": lines}):
            heights = {"height_ratios": [3, 2]}
            figure, axes = panels(2, 1, SIZE[1], width=SIZE[0], sharex=True, gridspec_kw=heights)
            above, below = axes[:, 0]
            for side, (dtype, comparisons), colour in zip((1 / SIDE, SIDE), series.items(), colours, strict=True):
                _draw_points(above, comparisons, side, colour, page)
                above.plot([], [], "o", color=colour, label=f"gradients in {dtype}")
                curve, tried = shares[dtype]
                below.plot(steps, curve, color=colour, linewidth=1.2)
                below.plot(batches, tried, "o", color=colour, markersize=4)
            above.axhline(0, color=ink, linewidth=0.8)
            above.legend(loc="upper left", labelcolor="linecolor", handlelength=0.6, fontsize=11)
            for axis, title in (above, MEASURED), (below, PREDICTED):
                axis.set_facecolor(page)
                axis.set_title(title, fontsize=11, fontweight="normal")
                axis.set_xscale("log")
                axis.minorticks_off()
            below.set_ylim(bottom=0)
            below.set_xlim(*ends)
            ticks = [x for x in batches if all(x == other or abs(x / other - 1) > 0.05 for other in batches[::2])]
            below.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
            below.set_xlabel("tokens in a batch")
            save(figure, study / "figures", f"{name}{ending}")
    return f"{name}.svg"


def _draw_points(axes: Axes, comparisons: Sequence[ContrastResult], side: float, colour: str, page: str) -> None:
    """Draw each comparison with its 95 % interval, hollow where it is not significant."""
    for one in comparisons:
        if (result := one.result) is not None:
            axes.errorbar(
                int(one.label) * side, result.difference.mean, result.difference.half_width, fmt="o", color=colour,
                markerfacecolor=colour if result.significant else page, markersize=5, linewidth=1.2,
            )  # fmt: skip


@contextmanager
def _coloured(page: str, ink: str, style: dict[str, Any]) -> Iterator[None]:
    """Apply the report's style inside the block, in the colours of a page and its text, and with ``style``."""
    with drawing():
        inked = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        settings: dict[Any, Any] = style | {"figure.facecolor": page} | dict.fromkeys(inked, ink)
        matplotlib.rcParams.update(settings)
        yield
