"""What the arms' updates did to quantized weights: how far in rungs, how like AdamW's, and how many codes stayed."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Table, words
from altgrad.reporting.figures.spec import in_report
from altgrad.reporting.figures.style import legend, looks, tiles
from altgrad.reporting.load import DIVERGED, Study
from altgrad.reporting.optimizer_roles import is_virtual
from altgrad.reporting.select import at_best, in_order, late, of_completed
from altgrad.reporting.wording import NONE, number, significant

RUNGS, BINADE, COSINE, STALL = "rungs", "rungs_2^", "cosine_adamw", "stall_ratio"


@in_report(
    section="updates", order=10,
    alt="Code steps that a step moves weights by, against the size of the weight, for each optimizer and format",
    caption="How far a step moves a weight, in code steps (from one representable value to the next), by the binade of "
    "its magnitude: mean over quantized weights, the watched steps of the second half of the run, layers and seeds. A "
    "flat line is the same number of code steps for small weights and large ones.",
)  # fmt: skip
def rungs_by_binade(study: Study, comparison: Comparison) -> Figure | None:
    """Mean rungs per step against the binade of |w|: a panel per arm, a line per format that quantizes something."""
    rows = recorded(study, comparison)
    table = by_binade(rows[~rows["format"].isin([name for name in study.formats if is_virtual(study, name)])])
    if table.empty:
        return None
    arms = in_order(study.optimizers, table.index.get_level_values("optimizer"))
    names = in_order(study.formats, table.index.get_level_values("format"))
    styles = looks(study.formats)
    figure, axes = tiles(len(arms), 2.4, sharex=True, sharey=True)
    for axis, arm in zip(axes, arms, strict=True):
        for name in names:
            if (arm, name) in table.index:
                line = table.loc[(arm, name)]
                line = line[line > 0]
                axis.plot(line.index, line.to_numpy(), **styles[name].line())
        axis.set(title=arm, yscale="log")
    figure.supxlabel("binade of |w|, exponent of two", fontsize="medium")
    figure.supylabel("code steps per optimizer step", fontsize="medium")
    legend(figure, styles, names)
    return figure


def recorded(study: Study, comparison: Comparison) -> pd.DataFrame:
    """Return the recorded updates on quantization grids in the second half of each run, arms at their best rate.

    Of completed runs: what one does as it diverges, even in a single tensor, is larger than all else in a mean.
    """
    rows = study.monitors[study.monitors["role"] == "update"]
    rows = rows[rows["metric"].str.startswith((RUNGS, COSINE, STALL))]
    return late(of_completed(at_best(rows, comparison), study)).dropna(subset="value")


def by_binade(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the mean rungs moved, indexed by optimizer and format, a column per binade of |w| (its exponent)."""
    mine = rows[rows["metric"].str.startswith(BINADE)]
    binade = mine["metric"].str.removeprefix(BINADE).astype(int)
    return mine.assign(binade=binade).pivot_table(index=["optimizer", "format"], columns="binade", values="value")


def updates_table(study: Study, comparison: Comparison) -> Table | None:
    """Arm x format: the cosine with AdamW's update, the rungs moved per step, and the updates that changed no code."""
    rows = recorded(study, comparison)
    if rows.empty:
        return None
    means = rows.groupby(["metric", "optimizer", "format"])["value"].mean()
    formats, arms = in_order(study.formats, rows["format"]), in_order(study.optimizers, rows["optimizer"])

    def cell(arm: str, name: str) -> str:
        cosine, rungs, stall = (means.get((metric, arm, name), np.nan) for metric in (COSINE, RUNGS, STALL))
        said = f"{number(cosine, 2)} / {significant(rungs, 2)} / {number(100 * stall, 0)}"
        return NONE if np.isnan(rungs) else said

    body = [
        ([f"**{arm}**", *(cell(arm, name) for name in formats)],
         [None, *(comparison.behind(name, arm) for name in formats)]) for arm in arms
    ]  # fmt: skip
    note = (
        "Cosine between the update, weight decay aside, and AdamW's on the same gradients / code steps that a weight "
        "moves in a step / updates that leave the weight's code, in %: of master weights the code of their quantized "
        "view, and a later step may change it. Means over quantized weights, layers, the watched steps of the second "
        "half of the run, and seeds."
    )
    if len(study.of_status(DIVERGED)):
        note += " Runs that diverged are left out."
    return Table.of([words("arm"), *(Column(name) for name in formats)], body, note)
