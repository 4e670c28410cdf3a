"""Update rules that the bench began with, and Madam, each with the plain arm of its regime: in a format and without."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.hypotheses import VIRTUAL, gains_over, own_part, seeds_of, told_apart, values_of
from altgrad.reporting.paired import with_interval
from altgrad.reporting.tables import words
from altgrad.reporting.wording import p_value

PLAIN = {"stiff_grad": "adamw", "riemann": "adamw", "rung": "adamw_sr", "madam": "adamw", "madam_sr": "adamw_sr"}
#: By part: the hypotheses of all rules, and of the own part of the one without masters, which is named.
OF = {"arms": ("A1", "A2", "rung"), "madam": ("A6", "A7", "madam_sr")}


def arms(losses: pd.Series, _plain: str, folder: Path) -> list[Block]:
    """Each rule against its plain arm in the first format, and the format's own part of the one without masters."""
    of_all, of_own, without_masters = OF[folder.name]
    entry, trained = values_of(losses, "format")[0], values_of(losses, "optimizer")
    plain = {arm: PLAIN[arm] for arm in trained if arm in PLAIN}
    gains = {arm: gains_over(losses, plain[arm], arm, entry) for arm in plain}
    without = {arm: gains_over(losses, plain[arm], arm, VIRTUAL + entry) for arm in plain}
    own = {arm: gains[arm] - without[arm] for arm in plain}
    p, told = told_apart(gains, "the plain arm")
    second = own_part(of_own, losses, plain[without_masters], without_masters)
    rows = [
        [f"`{arm}`", f"`{plain[arm]}`", with_interval(gains[arm]), p_value(p[arm]), with_interval(without[arm]),
         with_interval(own[arm])]
        for arm in plain
    ]  # fmt: skip
    columns = [
        words("arm"), words("over"), Column(f"gain in {entry}"), Column("p"), Column("gain without it"),
        Column("own part"),
    ]  # fmt: skip
    note = (
        f"Gain over the plain arm, nats per token, with 95 % intervals over {seeds_of(losses)} seeds, "
        f"each by itself; p by Holm over the {len(plain)} arms. Without it: on weights that nothing quantizes, and of "
        f"`{without_masters}` on rungs 256 times finer."
    )
    return [Text(f"**{of_all}.** In {entry}, {told}."), second, Table(columns, rows, note)]
