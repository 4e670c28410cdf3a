"""What others have found, and what the bench itself foretold, held against what it finds: as in `hypotheses`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd

from altgrad.config import UserError
from altgrad.config.files import read_yaml
from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.failures import FORETOLD, foretold, limit_of
from altgrad.reporting.hypotheses import names, sides
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import two_sided, with_interval
from altgrad.reporting.statistics import rank_correlation, wilson
from altgrad.reporting.tables import words
from altgrad.reporting.wording import number, p_value, percent_of, signed

# Sun et al. 2025 (arXiv 2501.02423), table of optimal splits, and the order of 8-bit splits that their law gives.
LAW_BEST = {3: "E1M1", 4: "E2M1", 5: "E2M2"}
WITHOUT = "E7M0"  # the format without a significand
LAW_ORDER = ("E4M3", "E3M4", "E5M2", "E2M5", "E6M1", "E1M6", "E7M0", "E0M7")


def gate_formats(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The order of splits under the plain arm, beside the law's: the best of 3, 4 and 5 bits, and all of 8."""
    hypothesis = "G3" if folder.name.endswith("-blocks") else "G1"
    table = losses.xs(plain, level="optimizer").unstack("format")
    width = {name: _width(name) for name in table}
    said, rows = [], []
    for bits, best in LAW_BEST.items():
        others = [name for name in table if width.get(name) == bits and name != best]
        above = {name: table[name] - table[best] for name in others}
        p = holm({name: two_sided(above[name]) for name in others})
        higher, lower, apart = sides(p, above)
        said.append(
            f"**{hypothesis}, {bits} bits.** Above the law's best, {best}: {names(higher)}; below it: {names(lower)}; "
            f"not told apart: {names(apart)}."
        )
        rows += [[f"**{name}**", with_interval(above[name]), best, p_value(p[name])] for name in others]
    eight = [name for name in LAW_ORDER if name in table]
    rho, _ = rank_correlation(table[eight].mean(), pd.Series(range(len(eight)), index=eight))
    if not math.isnan(rho):
        found = sorted(eight, key=lambda name: table[name].mean())
        said.append(
            f"**G2, 8 bits.** From the lowest loss: {names(found)}. The law: {names(eight)}. Spearman's rank "
            f"correlation {signed(rho, 2)}."
        )
        above = {name: table[name] - table[found[0]] for name in found[1:]}
        rows += [[f"**{name}**", with_interval(above[name]), found[0], "–"] for name in above]
    columns = [words("format"), Column("loss above"), words("that of"), Column("p")]
    note = (
        f"Differences in final validation loss under `{plain}`, nats per token, with 95 % intervals over {len(table)} "
        "seeds, each by itself; p by Holm over the splits of a width; the order of 8 bits is not tested."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def what_if(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The recipe of the highest SQNR against each single format of equal bits, with Holm over those of a width.

    A format of which no seed completed is named, and counts in the family, as HYPOTHESES.md has it, with a p of 1.
    """
    planned = read_yaml(folder / "params.yaml")["grid"]["formats"]
    table = losses.xs(plain, level="optimizer").unstack("format")
    said, rows = [], []
    for hypothesis, bits in (("W1", 4), ("W2", 8)):
        recipe = f"what_if{bits}"
        of_width = [name for name in planned if _width(name) == bits]
        single = [name for name in of_width if name in table]
        diverged = [name for name in of_width if name not in table]
        above = {name: table[recipe] - table[name] for name in single}
        p = holm({name: two_sided(above[name]) for name in single} | dict.fromkeys(diverged, 1.0))
        higher, lower, apart = sides(p, above)
        said.append(
            f"**{hypothesis}, {bits} bits.** The recipe ends below {names(lower)}; above {names(higher)}; not told "
            f"apart from {names(apart)}." + (f" Diverged with every seed: {names(diverged)}." if diverged else "")
        )
        rows += [[f"`{recipe}`", f"**{name}**", with_interval(above[name]), p_value(p[name])] for name in single]
    columns = [words("recipe"), words("single format"), Column("loss above it"), Column("p")]
    note = (
        f"Differences in final validation loss under `{plain}`, nats per token, with 95 % intervals over {len(table)} "
        "seeds, each by itself; p by Holm over the formats of a width."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def rounding(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """What rounding by chance changes, of gradients and of the forward pass: NVIDIA 2025, arXiv 2509.25149."""
    table = losses.xs(plain, level="optimizer").unstack("format")
    of_what = {"grads": ("R1", "gradients"), "forward": ("R2", "weights and inputs")}
    changes = [name for name in table if name.rpartition("_")[2] in of_what]
    above = {name: table[name] - table[name.rpartition("_")[0]] for name in changes}
    p = holm({name: two_sided(found) for name, found in above.items()})
    said, rows = [], []
    for what, (hypothesis, tensors) in of_what.items():
        of_these = {name: name.rpartition("_")[0] for name in changes if name.endswith(f"_{what}")}
        higher, lower, apart = (
            [of_these[name] for name in found] for found in sides(p, {name: above[name] for name in of_these})
        )
        said.append(
            f"**{hypothesis}.** With {tensors} rounded by chance, lower than to nearest in {names(lower)}; higher in "
            f"{names(higher)}; not told apart in {names(apart)}."
        )
        rows += [[f"`{of}`", tensors, with_interval(above[name]), p_value(p[name])] for name, of in of_these.items()]
    columns = [words("recipe"), words("by chance"), Column("loss above nearest"), Column("p")]
    note = (
        f"Differences in final validation loss under `{plain}`, nats per token, with 95 % intervals over "
        f"{len(table)} seeds, each by itself; p by Holm over the {len(above)} differences."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def gate_tokens(folder: Path) -> list[Block]:
    """What quantizing weights after training costs, by how long they were trained: Kumar et al. 2024, arXiv 2411.04330.

    ``folder`` holds a folder for each number of steps, with the table of ``diagnostics ptq`` in ``after.csv``. Raises
    :class:`UserError` for fewer than two.
    """
    lengths = sorted(int(path.parent.name) for path in folder.glob("*/after.csv"))
    if len(lengths) < 2:
        raise UserError(f"{folder}: fewer than two lengths; make study PART=gate-tokens makes all of them")
    tables = {steps: pd.read_csv(folder / str(steps) / "after.csv") for steps in lengths}
    costs = {steps: table.pivot_table(index="cell", columns="format", values="cost") for steps, table in tables.items()}
    formats = [name for name in tables[lengths[0]]["format"].unique() if _width(name)]
    first, last = costs[lengths[0]], costs[lengths[-1]]
    grown = {name: last[name] - first[name] for name in formats}
    p = holm({name: two_sided(grown[name]) for name in formats})
    more, less, apart = sides(p, grown)
    said = (
        f"**K1.** From {lengths[0]} to {lengths[-1]} steps the damage of quantizing weights after training grows in "
        f"{names(more)}; shrinks in {names(less)}; not told apart in {names(apart)}."
    )
    rows = [
        [f"**{name}**", *(with_interval(costs[steps][name]) for steps in lengths),
         with_interval(grown[name]), p_value(p[name])]
        for name in formats
    ]  # fmt: skip
    columns = [words("format"), *(Column(f"after {steps} steps") for steps in lengths), Column("growth"), Column("p")]
    note = (
        "Validation loss of the weights quantized after training minus that of the weights as they are, nats per "
        f"token, with 95 % intervals over {len(first)} seeds, each by itself; p by Holm over the formats."
    )
    return [Text(said), Table(columns, rows, note)]


def no_significand(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """How many runs of each format fail, by arm and learning rate; ``losses`` also by rate, of completed runs alone."""
    params = read_yaml(folder / "params.yaml")
    grid, vocabulary = params["grid"], params["tokenizer"]["vocab_size"]
    rates, seeds = sorted(grid["lr_scales"]), len(grid["seeds"])
    rows, failed, collapse = [], dict.fromkeys(grid["formats"], 0), {}
    for arm in grid["optimizers"]:
        best = losses.xs((grid["baseline"], arm), level=("format", "optimizer")).groupby("lr_scale").mean().min()
        limit = limit_of(vocabulary, best)
        for entry in grid["formats"]:
            own = losses[(losses.index.get_level_values("format") == entry)
                         & (losses.index.get_level_values("optimizer") == arm)]  # fmt: skip
            by_rate = {rate: own[own.index.get_level_values("lr_scale") == rate] for rate in rates}
            fails = {rate: seeds - int((found <= limit).sum()) for rate, found in by_rate.items()}
            failed[entry] += sum(fails.values())
            collapse[arm, entry] = next((rate for rate in rates if 2 * fails[rate] > seeds), None)
            cells = [
                f"{number(found.mean(), 3)} ({fails[rate]} of {seeds})" if len(found) else f"– ({seeds} of {seeds})"
                for rate, found in by_rate.items()
            ]
            rows.append([f"**{entry}**", f"`{arm}`", *cells])
    total = seeds * len(rates) * len(grid["optimizers"])
    shares = ", ".join(f"{entry} {percent_of(count, total)}" for entry, count in failed.items())
    verdict = foretold(*wilson(failed[WITHOUT], total))
    said = [
        f"**E1.** Runs that fail: {shares}. That more than {100 * FORETOLD:.0f} % of {WITHOUT}'s do {verdict}.",
        "**E2.** The lowest rate at which most fail: " + "; ".join(
            f"`{arm}` " + ", ".join(f"{entry} {_rate(collapse[arm, entry])}" for entry in grid["formats"])
            for arm in grid["optimizers"]
        ) + ".",
    ]  # fmt: skip
    columns = [words("format"), words("arm"), *(Column(f"{rate:g} times the rate") for rate in rates)]
    note = (
        "Mean final validation loss of the runs that completed, nats per token, and how many fail: diverge, or end "
        f"above the middle between ln {vocabulary} and {grid['baseline']}'s best."
    )
    return [*map(Text, said), Table(columns, rows, note)]


def _rate(scale: float | None) -> str:
    return "none" if scale is None else f"{scale:g} times"


def _width(name: str) -> int | None:
    """Return the bits of a split's name such as E4M3, ``None`` for another entry."""
    return 1 + int(name[1]) + int(name[3]) if re.fullmatch(r"E\dM\d", name) else None
