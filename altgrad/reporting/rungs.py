"""Whole rungs on weights without masters, in several formats: parts of the study that are a folder for each.

A rung is a step of another size in each format, so each has learning rates, and so a part, of its own.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from altgrad.config import UserError
from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.hypotheses import VIRTUAL, gains_over, own_by_format, seeds_of, told_apart, values_of
from altgrad.reporting.paired import with_interval
from altgrad.reporting.parts import read_losses
from altgrad.reporting.tables import words
from altgrad.reporting.wording import p_value

#: Which hypotheses a part decides: of `RUNG` over `PLAIN`, of that over `WITH_MASTERS`, and of the formats' own part.
OF = {"rungs": ("A3", "A5", "A4"), "ladder-nano-rungs": ("L33", "L34", "L37"),
      "ladder-nano-rungs-own": ("L52", None, "L53"), "ladder-micro-rungs": ("L54", "L55", "L56")}  # fmt: skip
RUNG, PLAIN, WITH_MASTERS = "rung", "adamw_sr", "adamw"


def rungs(folder: Path) -> list[Block]:
    """What whole rungs gain in each format, what of that is the format's own, and what rounding by chance costs there.

    ``folder`` holds a folder with results.csv for each format, and maybe for its virtual twin. Of own parts nothing is
    said until every format has its twin, since they are one family, and of rounding by chance nothing where no arm
    keeps masters. Raises :class:`UserError` if there is no format.
    """
    paths = sorted(folder.glob("*/results.csv"))
    if all(path.parent.name.startswith(VIRTUAL) for path in paths):
        raise UserError(f"{folder}: no format in it; make study PART={folder.name} makes all of them")
    losses = pd.concat([read_losses(path.parent) for path in paths])
    entries = values_of(losses, "format")
    formats = [entry for entry in entries if not entry.startswith(VIRTUAL)]
    over_plain = {entry: gains_over(losses, PLAIN, RUNG, entry) for entry in entries}
    gains = {fmt: over_plain[fmt] for fmt in formats}
    own = {}
    if all(VIRTUAL + fmt in entries for fmt in formats):
        own = {fmt: gains[fmt] - over_plain[VIRTUAL + fmt] for fmt in formats}

    of_rung, of_chance, of_own = OF[folder.name]
    p, told = told_apart(gains, f"`{PLAIN}`", mark="")
    said = [Text(f"**{of_rung}.** `{RUNG}` ends {told}.")]
    columns = {f"gain of {RUNG} over {PLAIN}": (gains, p)}
    note = f"Nats per token, with 95 % intervals over {seeds_of(losses)} seeds, each by itself; p "
    note += f"by Holm over the {len(formats)} formats of a column." if len(formats) > 1 else "too."
    if own:
        own_said, p_own = own_by_format(of_own, RUNG, own)
        said.append(own_said)
        columns["own part"] = (own, p_own)
        note += " Own part: the gain minus that on a quantization grid of the same shape, 256 times finer."
    if WITH_MASTERS in values_of(losses, "optimizer"):
        of_plain = {fmt: gains_over(losses, WITH_MASTERS, PLAIN, fmt) for fmt in formats}
        p_plain, told_plain = told_apart(of_plain, f"`{WITH_MASTERS}`", mark="")
        said.append(Text(f"**{of_chance}.** `{PLAIN}` ends {told_plain}."))
        columns[f"gain of {PLAIN} over {WITH_MASTERS}"] = (of_plain, p_plain)
    rows = [
        [f"**{fmt}**", *(shown for of_formats, levels in columns.values()
                         for shown in (with_interval(of_formats[fmt]), p_value(levels[fmt])))]
        for fmt in formats
    ]  # fmt: skip
    heads = [column for name in columns for column in (Column(name), Column("p"))]
    return [*said, Table([words("format"), *heads], rows, note)]
