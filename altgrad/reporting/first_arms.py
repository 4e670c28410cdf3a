"""The part `arms` of the study: update rules with the plain arms of their regimes, in a format and without it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.hypotheses import VIRTUAL, gains_over, own_part, told_apart, values_of
from altgrad.reporting.paired import with_interval
from altgrad.reporting.tables import words
from altgrad.reporting.wording import p_value

PLAIN = {"stiff_grad": "adamw", "riemann": "adamw", "rung": "adamw_sr"}
WITHOUT_MASTERS = "rung"


def arms(losses: pd.Series, _plain: str, _folder: Path) -> list[Block]:
    """Each rule against its plain arm in the first format (A1), and what is left of `rung` on finer rungs (A2)."""
    entry = values_of(losses, "format")[0]
    gains = {arm: gains_over(losses, plain, arm, entry) for arm, plain in PLAIN.items()}
    without = {arm: gains_over(losses, plain, arm, VIRTUAL + entry) for arm, plain in PLAIN.items()}
    own = {arm: gains[arm] - without[arm] for arm in PLAIN}
    p, told = told_apart(gains, "the plain arm")
    second = own_part("A2", losses, PLAIN[WITHOUT_MASTERS], WITHOUT_MASTERS)
    rows = [
        [f"`{arm}`", f"`{plain}`", with_interval(gains[arm]), p_value(p[arm]), with_interval(without[arm]),
         with_interval(own[arm])]
        for arm, plain in PLAIN.items()
    ]  # fmt: skip
    columns = [
        words("arm"), words("over"), Column(f"gain in {entry}"), Column("p"), Column("gain without it"),
        Column("own part"),
    ]  # fmt: skip
    note = (
        f"Gain over the plain arm, nats per token, with 95 % intervals over {len(losses.index.unique('seed'))} seeds, "
        f"each by itself; p by Holm over the {len(PLAIN)} arms. Without it: on weights that nothing quantizes, and of "
        f"`{WITHOUT_MASTERS}` on rungs 256 times finer."
    )
    return [Text(f"**A1.** In {entry}, {told}."), second, Table(columns, rows, note)]
