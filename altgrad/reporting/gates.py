"""What others have found, and what the bench itself foretold, held against what it finds: as in `hypotheses`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.hypotheses import LEVEL, names
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import two_sided, with_interval
from altgrad.reporting.tables import words
from altgrad.reporting.wording import p_value, signed

# Sun et al. 2025 (arXiv 2501.02423), table of optimal splits, and the order of 8-bit splits that their law gives.
LAW_BEST = {3: "E1M1", 4: "E2M1", 5: "E2M2"}
LAW_ORDER = ("E4M3", "E3M4", "E5M2", "E2M5", "E6M1", "E1M6", "E7M0", "E0M7")


def gate_formats(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The order of splits under the plain arm, beside the law's: the best of 3, 4 and 5 bits, and all of 8."""
    hypothesis = "G3" if folder.name.endswith("-blocks") else "G1"
    table = losses.xs(plain, level="optimizer").unstack("format")
    width = {name: _width(name) for name in table}
    said, rows = [], []
    for bits, best in LAW_BEST.items():
        others = [name for name in table if width.get(name) == bits and name != best]
        above = {name: (table[name] - table[best]).to_numpy() for name in others}
        p = holm({name: two_sided(above[name]) for name in others})
        lower = [name for name in others if p[name] < LEVEL and above[name].mean() < 0]
        higher = [name for name in others if p[name] < LEVEL and above[name].mean() > 0]
        apart = [name for name in others if name not in (*lower, *higher)]
        said.append(
            f"**{hypothesis}, {bits} bits.** Above the law's best, {best}: {names(higher)}; below it: {names(lower)}; "
            f"not told apart: {names(apart)}."
        )
        rows += [[f"**{name}**", with_interval(above[name]), best, p_value(p[name])] for name in others]
    eight = [name for name in LAW_ORDER if name in table]
    if len(eight) > 1:
        found = sorted(eight, key=lambda name: table[name].mean())
        said.append(
            f"**G2, 8 bits.** From the lowest loss: {names(found)}. The law: {names(eight)}. Spearman's rank "
            f"correlation {signed(_rank_correlation(found, eight), 2)}."
        )
        above = {name: (table[name] - table[found[0]]).to_numpy() for name in found[1:]}
        rows += [[f"**{name}**", with_interval(above[name]), found[0], "–"] for name in above]
    columns = [words("format"), Column("loss above"), words("that of"), Column("p")]
    note = (
        f"Differences in final validation loss under `{plain}`, nats per token, with 95 % intervals over {len(table)} "
        "seeds, each by itself; p by Holm over the splits of a width; the order of 8 bits is not tested."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def what_if(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """The recipe of the highest SQNR against each single format of equal bits, with Holm over those of a width."""
    table = losses.xs(plain, level="optimizer").unstack("format")
    said, rows = [], []
    for hypothesis, bits in (("W1", 4), ("W2", 8)):
        recipe = f"what_if{bits}"
        single = [name for name in losses.index.unique("format") if _width(name) == bits]
        below = {name: (table[recipe] - table[name]).to_numpy() for name in single}
        p = holm({name: two_sided(below[name]) for name in single})
        lower = [name for name in single if p[name] < LEVEL and below[name].mean() < 0]
        higher = [name for name in single if p[name] < LEVEL and below[name].mean() > 0]
        apart = [name for name in single if name not in (*lower, *higher)]
        said.append(
            f"**{hypothesis}, {bits} bits.** The recipe ends below {names(lower)}; above {names(higher)}; not told "
            f"apart from {names(apart)}."
        )
        rows += [[f"`{recipe}`", f"**{name}**", with_interval(below[name]), p_value(p[name])] for name in single]
    columns = [words("recipe"), words("single format"), Column("loss above it"), Column("p")]
    note = (
        f"Differences in final validation loss under `{plain}`, nats per token, with 95 % intervals over {len(table)} "
        "seeds, each by itself; p by Holm over the formats of a width."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def _width(name: str) -> int | None:
    """Return the bits of a split's name such as E4M3, ``None`` for another entry."""
    return 1 + int(name[1]) + int(name[3]) if re.fullmatch(r"E\dM\d", name) else None


def _rank_correlation(order: Sequence[str], other: Sequence[str]) -> float:
    """Return Spearman's correlation of two orders of the same names."""
    n = len(order)
    return 1 - 6 * sum((order.index(name) - other.index(name)) ** 2 for name in order) / (n * (n * n - 1))
