"""Whole rungs on weights without masters, in several formats: parts of the study that are a folder for each.

A rung is a step of another size in each format, so each has learning rates, and so a part, of its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from altgrad.config import UserError
from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.hypotheses import VIRTUAL, gains_over, names, sides, told_apart, values_of
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import two_sided, with_interval
from altgrad.reporting.parts import read_losses
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE, joined, p_value, stated_p

#: Which hypotheses a part decides: of `RUNG` over `PLAIN`, of that over `WITH_MASTERS`, and of the formats' own part.
OF = {"rungs": ("A3", "A5", "A4"), "ladder-nano-rungs": ("L33", "L34", "L37"),
      "ladder-nano-rungs-own": ("L52", None, "L53"), "ladder-micro-rungs": ("L54", "L55", "L56")}  # fmt: skip
#: What says which step from finer rungs to the format an own part comes from.
OF_STEPS = "L58"
WEIGHTS = "weight_only."  # entries of which the weights are quantized alone
RUNG, PLAIN, WITH_MASTERS = "rung", "adamw_sr", "adamw"


def rungs(folder: Path) -> list[Block]:
    """What whole rungs gain in each format, what of that is the format's own, and what rounding by chance costs there.

    ``folder`` holds a folder with results.csv for each format, and maybe for its virtual twin and for the format of
    the weights alone. The own part is that of the formats whose twins are there, and of rounding by chance nothing is
    said where no arm keeps masters. Raises :class:`UserError` if there is no format.
    """
    found = [read_losses(path.parent) for path in sorted(folder.glob("*/results.csv"))]
    if not found:
        raise UserError(f"{folder}: no format in it; make study PART={folder.name}-E4M3 makes one of them")
    losses = pd.concat(found)
    entries = values_of(losses, "format")
    formats = [entry for entry in entries if not entry.startswith((VIRTUAL, WEIGHTS))]
    over_plain = {entry: gains_over(losses, PLAIN, RUNG, entry) for entry in entries}
    gains = {fmt: over_plain[fmt] for fmt in formats}
    own = {fmt: gains[fmt] - over_plain[VIRTUAL + fmt] for fmt in formats if VIRTUAL + fmt in entries}

    of_rung, of_chance, of_own = OF[folder.name]
    p, told = told_apart(gains, f"`{PLAIN}`", mark="")
    said = [f"**{of_rung}.** `{RUNG}` ends {told}."]
    columns = {f"gain of {RUNG} over {PLAIN}": (gains, p)}
    note = (
        f"Nats per token, with 95 % intervals over {len(losses.index.unique('seed'))} seeds, each by itself; p by Holm "
        f"over the {len(formats)} formats of a column."
    )
    if own:
        p_own = holm({fmt: two_sided(part) for fmt, part in own.items()})
        above, below, apart = sides(p_own, own)
        said.append(
            f"**{of_own}.** The format's own part of what `{RUNG}` gains is above zero in {names(above)}; below in "
            f"{names(below)}; not told apart in {names(apart)}."
        )
        columns["own part"] = (own, p_own)
        note += " Own part: the gain minus that on a quantization grid of the same shape, 256 times finer."
        said += [_steps(fmt, over_plain) for fmt in own if WEIGHTS + fmt in entries]
    if WITH_MASTERS in values_of(losses, "optimizer"):
        of_plain = {fmt: gains_over(losses, WITH_MASTERS, PLAIN, fmt) for fmt in formats}
        p_plain, told_plain = told_apart(of_plain, f"`{WITH_MASTERS}`", mark="")
        said.append(f"**{of_chance}.** `{PLAIN}` ends {told_plain}.")
        columns[f"gain of {PLAIN} over {WITH_MASTERS}"] = (of_plain, p_plain)
    rows = [
        [f"**{fmt}**", *(shown for of_formats, levels in columns.values()
                         for shown in ((with_interval(of_formats[fmt]), p_value(levels[fmt]))
                                       if fmt in of_formats else (NONE, NONE)))]
        for fmt in formats
    ]  # fmt: skip
    heads = [column for name in columns for column in (Column(name), Column("p"))]
    return [*map(Text, said), Table([words("format"), *heads], rows, note)]


def _steps(fmt: str, over_plain: dict[str, np.ndarray]) -> str:
    """Say what of the own part is there with the weights in ``fmt`` alone, and what comes with the other operands."""
    path = [over_plain[entry] for entry in (VIRTUAL + fmt, WEIGHTS + fmt, fmt)]
    steps = {"with the weights on its grid": path[1] - path[0], "with the other operands in it": path[2] - path[1]}
    p = holm({name: two_sided(step) for name, step in steps.items()})
    shown = [f"{name} {with_interval(step)} ({stated_p(p[name])})" for name, step in steps.items()]
    return f"**{OF_STEPS}.** Of the own part in {fmt} there comes {joined(shown)}, by Holm over the two."
