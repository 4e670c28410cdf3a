"""Whether an update rule trains few weights: its loss without the smaller half of them, and in other widths."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from altgrad.config import UserError
from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.hypotheses import gains_over, names, seeds_of, sides, tested, told_apart, values_of
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import mean, two_sided, with_interval
from altgrad.reporting.parts import parts_in
from altgrad.reporting.tables import words
from altgrad.reporting.wording import LEVEL, number, p_value, stated_p

STIFF, PLAIN = "stiff_matched", "adamw"
HALF = 0.5  # the share of each layer's weights that the hypotheses are about


def pruned(losses: pd.Series, _plain: str, folder: Path) -> list[Block]:
    """What half of its weights is worth to each arm (L43), and which arm ends lower without it (L44).

    ``folder`` has the table of ``diagnostics prune`` in ``pruned.csv``. Raises :class:`UserError` if it has none.
    """
    path = folder / "pruned.csv"
    if not path.is_file():
        raise UserError(f"{folder}: no pruned.csv; make study PART={folder.name} makes it")
    table = pd.read_csv(path).set_index(["optimizer", "share", "seed"]).sort_index()
    arms = values_of(losses, "optimizer")

    def of(measure: str, arm: str, share: float = HALF) -> pd.Series:
        return table.loc[(arm, share), measure]

    more = {arm: of("cost", arm) - of("cost", STIFF) for arm in arms if arm != STIFF}
    p = holm({arm: two_sided(difference) for arm, difference in more.items()})
    less_than, more_than, apart = sides(p, more)
    gain = of("after", PLAIN) - of("after", STIFF)
    worth = (
        f"**L43.** The smaller half of its weights is worth less to `{STIFF}` than to: {names(less_than, '`')}; more "
        f"than to: {names(more_than, '`')}; not told apart: {names(apart, '`')}."
    )
    without = f"**L44.** What `{STIFF}` gains over `{PLAIN}` without that half: {tested(gain)}."
    shares = [share for share in table.index.unique("share") if share]
    rows = [
        [f"`{arm}`", number(of("after", arm, 0.0).mean(), 4),
         *(with_interval(of("cost", arm, share)) for share in shares), p_value(p.get(arm))]
        for arm in arms
    ]  # fmt: skip
    columns = [words("arm"), Column("loss"), *(Column(f"{100 * share:g} % at zero") for share in shares), Column("p")]
    note = (
        "Validation loss, nats per token, and what it rises by with that share of each layer's weights at zero, the "
        f"smallest, with 95 % intervals over {seeds_of(losses)} seeds, each by itself; p of the "
        f"difference from `{STIFF}` at {100 * HALF:g} %, by Holm over the {len(more)} arms."
    )
    return [Text(worth), Text(without), Table(columns, rows, note)]


def widths(folder: Path) -> list[Block]:
    """What `STIFF` gains over `PLAIN` in models of other widths (L41), and the difference of two of them (L42).

    ``folder`` holds a folder for each width. Raises :class:`UserError` for fewer than two.
    """
    losses = {part.width: part.losses for part in parts_in(folder, ["*"])}
    if len(losses) < 2:
        raise UserError(f"{folder}: fewer than two widths; make study PART=length-3200-narrow makes one of them")
    found = sorted(losses)
    gains = {
        f"{width}": gains_over(losses[width], PLAIN, STIFF, values_of(losses[width], "format")[0]) for width in found
    }
    p, told = told_apart(gains, f"`{PLAIN}`, by width", mark="")
    first, *_, last = gains
    more = gains[last] - gains[first]
    wider = f"**L42.** What it gains at width {last} minus what it gains at {first}: {with_interval(more)}, "
    wider += f"{stated_p(two_sided(more))}, "
    if two_sided(more) >= LEVEL:
        wider += "not told apart."
    else:
        less, more_lost = ("less is lost, or more gained", "more is lost, or less gained")
        wider += f"{less if mean(more) > 0 else more_lost}, in the wider."
    rows = [[width, with_interval(gain), p_value(p[width])] for width, gain in gains.items()]
    note = (
        f"Gain over `{PLAIN}`, nats per token, with 95 % intervals over {len(more)} seeds, each by itself; p by Holm "
        f"over the {len(gains)} widths."
    )
    said = [Text(f"**L41.** `{STIFF}` ends {told}."), Text(wider)]
    return [*said, Table([Column("width"), Column(f"gain of {STIFF}"), Column("p")], rows, note)]
