"""The figure of a question about the tokens of a step: what was found, above what the arithmetic of scales predicts.

The prediction has no free parameter. It is the share of the right tokens' gradients that scales by ``floor`` clamp, as
`altgrad.formats.clamping` has it, for the probabilities that a run without quantization gave to its right tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from altgrad.formats.clamping import cut_off, right_token
from altgrad.reporting.figures.style import drawing, panels, save
from altgrad.reporting.study.answers import Answer, Comparison
from altgrad.reporting.study.front import SCHEMES

PROBABILITIES = "right_tokens.csv"  # columns gradients (their dtype), p: quantiles over a run, at equal distances
SIZE = 6.4, 4.8  # inches, as README's other figure
POINTS = 400  # of the predicted curve
SIDE = 1.006  # series are drawn so far from each other that intervals at the same tokens do not hide one another
FOUND = "loss with scales rounded down − rounded up, nats per token"
PREDICTED = "predicted: clamped share of the right tokens' gradient, %"
FORMAT = "E4M3"  # of the gradient in MXFP8


def clamped_share(tokens: int, probabilities: Sequence[float], *, bf16: bool) -> float:
    """Return the share of the right tokens' gradients, summed, that scales by ``floor`` clamp."""
    sizes = [right_token(tokens, p, bf16=bf16) for p in probabilities]
    return float(sum(size * cut_off(size, FORMAT, "floor") for size in sizes) / sum(sizes))


def draw_curve(answers: Sequence[Answer], names: Mapping[str, str], study: Path) -> str:
    """Draw ``figures/<question>.svg``, ``-dark.svg`` and PNG of both below ``study``; return the file's name.

    ``names`` are the dtypes of gradients, float32 or bf16, by hypothesis, whose comparisons are labelled by tokens.
    """
    found = {names[answer.name]: answer.comparisons for answer in answers if answer.name in names}
    probabilities = pd.read_csv(study / "results" / PROBABILITIES).groupby("gradients")["p"].apply(list)
    seen = sorted({int(one.label) for comparisons in found.values() for one in comparisons})
    ends = seen[0] / 1.04, seen[-1] * 1.06
    steps = np.unique(np.geomspace(*ends, POINTS).round().astype(int)).tolist()

    def predicted(dtype: str, batches: Sequence[int]) -> list[float]:
        return [100 * clamped_share(tokens, probabilities[dtype], bf16=dtype == "bf16") for tokens in batches]

    shares = {dtype: (predicted(dtype, steps), predicted(dtype, seen)) for dtype in found}
    for ending, (page, ink, lines, *colours) in SCHEMES.items():
        with drawing():
            matplotlib.rcParams.update({"font.size": 11, "figure.facecolor": page, "grid.color": lines})
            for part in ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"):
                matplotlib.rcParams[part] = ink
            heights = {"height_ratios": [3, 2]}
            figure, axes = panels(2, 1, SIZE[1], width=SIZE[0], sharex=True, gridspec_kw=heights)
            above, below = axes[:, 0]
            for side, (dtype, comparisons), colour in zip((1 / SIDE, SIDE), found.items(), colours, strict=True):
                _points(above, comparisons, side, colour, page)
                above.plot([], [], "o", color=colour, label=f"gradients in {dtype}")
                curve, tried = shares[dtype]
                below.plot(steps, curve, color=colour, linewidth=1.2)
                below.plot(seen, tried, "o", color=colour, markersize=4)
            above.axhline(0, color=ink, linewidth=0.8)
            above.legend(loc="upper left", labelcolor="linecolor", handlelength=0.6, fontsize=11)
            for axis, title in (above, FOUND), (below, PREDICTED):
                axis.set_facecolor(page)
                axis.set_title(title, fontsize=11, fontweight="normal")
                axis.set_xscale("log")
                axis.minorticks_off()
            below.set_ylim(bottom=0)
            below.set_xlim(*ends)
            ticks = [tick for tick in seen if all(tick == other or abs(tick / other - 1) > 0.05 for other in seen[::2])]
            below.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45)
            below.set_xlabel("tokens in a batch")
            save(figure, study / "figures", f"{answers[0].question.name}{ending}")
    return f"{answers[0].question.name}.svg"


def _points(axes: Axes, comparisons: Sequence[Comparison], side: float, colour: str, page: str) -> None:
    """Draw each comparison with its 95 % interval, hollow where it is not significant."""
    for compared in comparisons:
        if (result := compared.result) is not None:
            fill = colour if result.significant else page
            look: dict[str, Any] = {"color": colour, "markerfacecolor": fill, "markersize": 5, "linewidth": 1.2}
            axes.errorbar(int(compared.label) * side, result.difference.mean, result.half_width, fmt="o", **look)
