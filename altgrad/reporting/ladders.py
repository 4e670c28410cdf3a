"""The ladders of the study: whether a gain lasts in longer runs, and whether it holds in larger models.

Each part is called as those of :mod:`altgrad.reporting.hypotheses`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from altgrad.config.files import read_yaml
from altgrad.reporting.document import Block, Column, Picture, Table, Text
from altgrad.reporting.figures.decisions import Interval, draw_lengths
from altgrad.reporting.hypotheses import LEVEL, each_over_plain, gains_over, names, own_part, values_of
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import interval, two_sided, with_interval
from altgrad.reporting.tables import words
from altgrad.reporting.wording import joined, p_value

#: Which hypothesis a part decides.
OF = {"ladder-nano": "L2", "ladder-nano-twin": "L3", "ladder-nano-3300": "L4", "ladder-micro": "L5",
      "ladder-micro-twin": "L6"}  # fmt: skip
STIFF, SHUFFLED = "stiff_matched", "permuted_matched"


def larger(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What each arm gains in the first format in a larger model."""
    return each_over_plain(OF[folder.name], losses, plain)


def longer(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What each arm gains in the first format, longer trained.

    Beside it the same gains in the parts of fewer steps that lie next to ``folder``: a figure.
    """
    said, table = each_over_plain("L1", losses, plain)
    entry = values_of(losses, "format")[0]
    arms = [arm for arm in values_of(losses, "optimizer") if arm != plain]
    gains: dict[int, dict[str, Interval]] = {}
    for part in (folder.parent / "controls", *folder.parent.glob("length-*[0-9]")):
        if not (part / "results.csv").is_file():
            continue
        steps = read_yaml(part / "params.yaml")["train"]["steps"]
        of_part = pd.read_csv(part / "results.csv").set_index(["format", "optimizer", "seed"])["val_loss"]
        gains[steps] = {arm: interval(gains_over(of_part, plain, arm, entry)) for arm in arms}
    own = read_yaml(folder / "params.yaml")["train"]["steps"]
    shown = {steps: gains[steps] for steps in sorted(gains) if steps <= own}
    draw_lengths(shown, arms, folder / "figures")
    alt = f"Gain over AdamW in {entry} by the number of training steps, for {joined(arms)}"
    caption = f"Mean gain over {plain}, nats per token, with 95 % intervals; each arm at its rate of each length."
    return [said, Picture("lengths", alt, caption), table]


def longer_twin(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What each arm gains in the format and without it, no test."""
    return each_over_plain("Exploratory", losses, plain)


def larger_twin(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The format's own part of what its geometry gains in a larger model."""
    _said, table = each_over_plain("", losses, plain)  # whose decision is that of the part without twins
    return [own_part(OF[folder.name], losses, plain), table]


def larger_formats(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What the geometry of each format gains in a larger model, over the plain arm and over the shuffled one."""
    entries = values_of(losses, "format")
    over = {
        reference: {entry: gains_over(losses, reference, STIFF, entry) for entry in entries}
        for reference in (plain, SHUFFLED)
    }
    levels = {reference: holm({e: two_sided(gain) for e, gain in gains.items()}) for reference, gains in over.items()}

    def told(reference: str, sign: int) -> str:
        p, gains = levels[reference], over[reference]
        return names([entry for entry in entries if p[entry] < LEVEL and np.sign(gains[entry].mean()) == sign])

    said = [
        f"**{hypothesis}.** `{STIFF}` ends lower than `{reference}` in {told(reference, 1)}; higher in "
        f"{told(reference, -1)}; of the {len(entries)} formats."
        for hypothesis, reference in zip(("L7", "L8"), over, strict=True)
    ]
    rows = [
        [f"**{entry}**", *(part for reference, gains in over.items()
                           for part in (with_interval(gains[entry]), p_value(levels[reference][entry])))]
        for entry in entries
    ]  # fmt: skip
    columns = [
        words("format"), Column(f"gain over {plain}"), Column("p"), Column(f"gain over {SHUFFLED}"), Column("p"),
    ]  # fmt: skip
    note = (
        f"Gains of `{STIFF}`, nats per token, with 95 % intervals over {len(losses.index.unique('seed'))} seeds, each "
        f"by itself; p by Holm over the {len(entries)} formats of a column."
    )
    return [*map(Text, said), Table(columns, rows, note)]
