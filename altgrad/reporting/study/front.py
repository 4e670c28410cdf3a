"""README's figure: what each format costs against its bits per element, by the tokens of training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from altgrad.config.tensor_recipe import BLOCK_FORMATS
from altgrad.formats import get_format
from altgrad.reporting.figures.style import drawing, panels, save
from altgrad.reporting.study.answers import Answer
from altgrad.reporting.study.runs import Runs

NAME = "costs"
LOWEST, HIGHEST = 4e-4, 0.4  # nats, the ends of the axis, at which a cost beyond them is drawn
GAP = math.log(1.45)  # between the labels of a column, in the logarithm of the cost
SIZE = 6.4, 4.8  # inches; a phone shows it at half of that, so that letters are large
#: By the name's ending: page, ink, lines, and the colours of fewer and of more tokens (Okabe and Ito, one lighter).
SCHEMES = {
    "": ("#ffffff", "#1f2328", "#d8dce0", "#0072B2", "#D55E00"),
    "-dark": ("#0d1117", "#e6edf3", "#343b44", "#56B4E9", "#F0A35E"),
}


@dataclass(frozen=True)
class Cost:
    """The mean cost of a format, in nats per token, over paired ``seeds``; ``bits`` as `bits_per_element` has them."""

    format: str
    bits: float
    tokens: int
    mean: float
    seeds: int
    significant: bool


def costs(answers: Iterable[Answer], runs: Runs) -> list[Cost]:
    """Return the costs that hypotheses for the front page measured; of several of one, that of the most seeds."""
    found: dict[tuple[str, int], Cost] = {}
    for compared in (one for answer in answers if answer.hypothesis.front for one in answer.comparisons):
        (run,) = (run for run, weight in compared.runs.items() if weight > 0)
        if (result := compared.result) is not None:
            tokens, of_format = int(runs.of_experiment(run.experiment)["tokens"].max()), bits_per_element(run.format)
            seeds = result.difference.n
            cost = Cost(run.format, of_format, tokens, result.difference.mean, seeds, result.significant)
            known = found.setdefault((run.format, tokens), cost)
            found[run.format, tokens] = max(known, cost, key=lambda one: one.seeds)
    return sorted(found.values(), key=lambda cost: (cost.tokens, cost.bits, cost.mean))


def bits_per_element(name: str) -> float:
    """Return the bits of an element of a tensor in a format; with its part of a block's scale where it has one."""
    settings = BLOCK_FORMATS.get(name, {"format": name})
    bits = get_format(settings["format"]).bits
    return bits + get_format(settings["scale"]).bits / settings["block"] if "block" in settings else bits


def draw_costs(shown: list[Cost], folder: Path) -> None:
    """Draw the costs as ``folder/costs.svg`` and ``costs-dark.svg``, and as PNG."""
    columns = sorted({cost.bits for cost in shown})
    lengths = sorted({cost.tokens for cost in shown})
    for ending, (page, ink, lines, *colours) in SCHEMES.items():
        with drawing():
            matplotlib.rcParams.update({"font.size": 12, "axes.grid": False, "figure.facecolor": page})
            for name in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"):
                matplotlib.rcParams[name] = ink
            figure, ((axes,),) = panels(1, 1, SIZE[1], width=SIZE[0])
            axes.set_facecolor(page)
            axes.grid(axis="y", color=lines)
            for length, colour, side in zip(lengths, colours, (-1, 1), strict=False):
                for place, bits in enumerate(columns):
                    own = [cost for cost in shown if (cost.tokens, cost.bits) == (length, bits)]
                    means = [min(max(cost.mean, LOWEST), HIGHEST) for cost in own]
                    heights = apart([math.log(mean) for mean in means])
                    for cost, mean, height in zip(own, means, heights, strict=True):
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
            save(figure, folder, f"{NAME}{ending}")


def apart(heights: list[float]) -> list[float]:
    """Return ascending heights with `GAP` between neighbours, moved as little from where they were as this does."""
    moved = list(heights)
    for _ in range(200):
        for i in range(len(moved) - 1):
            lack = max(0.0, GAP - (moved[i + 1] - moved[i])) / 2
            moved[i], moved[i + 1] = moved[i] - lack, moved[i + 1] + lack
    return moved
