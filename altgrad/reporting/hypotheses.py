"""The hypotheses of the study, each with the statistic and the test that reports/study/HYPOTHESES.md names for it.

A part takes ``losses``, final validation losses in nats per token by format, optimizer and seed; ``plain``, the arm
that others are held against; and the part's folder, for its figures. It returns what is said and the table behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from altgrad.reporting.document import Block, Column, Picture, Table, Text
from altgrad.reporting.figures.decisions import draw_matrix, draw_own, draw_profile
from altgrad.reporting.multiplicity import holm
from altgrad.reporting.paired import interval, mean, two_sided, with_interval
from altgrad.reporting.tables import words
from altgrad.reporting.wording import LEVEL, number, p_value, stated_p

AS, VIRTUAL = "as_", "virtual."  # how the parts call an arm with a format's geometry, and a virtual twin


# --- the statistics --------------------------------------------------------------------------------


def diagonal(losses: np.ndarray) -> float:
    """Return how much lower the diagonal of a table lies than the rest, rows' and columns' own levels taken out.

    Args:
        losses: (F, F), a row per geometry and a column per format, in one order.

    Returns:
        The mean residual on the diagonal minus the mean residual off it, in the unit of ``losses``: zero for any
        table that is a sum of something of its row and something of its column.
    """
    residual = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    on = np.eye(len(losses), dtype=bool)
    return float(residual[on].mean() - residual[~on].mean())


# --- the parts -------------------------------------------------------------------------------------


def matrix(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """Every geometry in every format: the table of gains, and the statistic of its diagonal."""
    table = losses.unstack("optimizer")
    arms = [name for name in values_of(losses, "optimizer") if name.startswith(AS)]
    formats = [name.removeprefix(AS) for name in arms]
    seeds = sorted(table.index.unique("seed"))

    def gain(arm: str, fmt: str) -> pd.Series:
        return gains_over(losses, plain, arm, fmt).reindex(seeds)

    deltas = np.array([
        diagonal(table.xs(seed, level="seed").reindex(formats)[arms].to_numpy().T) for seed in seeds
    ])  # fmt: skip
    rows = [
        [f"**{fmt}**", *(with_interval(gain(arm, column)) for column in formats),
         with_interval(np.mean([gain(arm, column) for column in formats], axis=0))]
        for arm, fmt in zip(arms, formats, strict=True)
    ]  # fmt: skip
    columns = [words("geometry of"), *(Column(f"in {fmt}") for fmt in formats), Column("mean")]
    note = (
        f"Gain over `{plain}` in the same format, nats per token, with its 95 % interval over {len(seeds)} seeds, each "
        "interval by itself. On the diagonal a format has its own geometry."
    )
    p = two_sided(deltas)
    if p >= LEVEL:
        verdict = "not told apart from zero: that the geometry is the format's own is not seen to matter"
    elif mean(deltas) < 0:
        verdict = "below zero: a format gains from its own geometry beyond what that geometry gains elsewhere"
    else:
        verdict = "above zero: a format's own geometry serves it worse than others do"
    said = (
        f"**H1.** The diagonal's loss minus the others', rows and columns taken out: {with_interval(deltas, 5)}, "
        f"{stated_p(p)}, {verdict}."
    )
    figures = folder / "figures"
    draw_matrix(np.array([[mean(gain(arm, fmt)) for fmt in formats] for arm in arms]), formats, figures)
    own = [interval(gain(AS + fmt, fmt)) for fmt in formats]
    others = [[gain(AS + fmt, other) for other in formats if other != fmt] for fmt in formats]
    draw_own(own, [interval(np.mean(found, axis=0)) for found in others], formats, figures)
    alt = "Gain over AdamW by the format whose geometry the steps follow and the format that is trained in"
    caption = f"Mean gain over {plain}, nats per token, {len(seeds)} paired seeds. Framed: a format's own geometry."
    return [Text(said), Picture("matrix", alt, caption), Table(columns, rows, note)]


def own_parts(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What an arm gains in a format minus what it gains on finer rungs: per format, with Holm over them."""
    entries = [name for name in values_of(losses, "format") if not name.startswith(VIRTUAL)]
    arms = [name for name in values_of(losses, "optimizer") if name != plain]
    stiff, null = sorted(arms, key=lambda name: "permuted" in name)

    def gain(arm: str, entry: str) -> pd.Series:
        return gains_over(losses, plain, arm, entry)

    own = {(arm, entry): gain(arm, entry) - gain(arm, VIRTUAL + entry) for arm in arms for entry in entries}
    against = {entry: own[stiff, entry] - own[null, entry] for entry in entries}
    p_own = holm({entry: two_sided(own[stiff, entry]) for entry in entries})
    p_null = holm({entry: two_sided(against[entry]) for entry in entries})
    rows = [
        [f"**{entry}**", with_interval(gain(stiff, entry)), with_interval(gain(stiff, VIRTUAL + entry)),
         with_interval(own[stiff, entry]), p_value(p_own[entry]), with_interval(own[null, entry]),
         with_interval(against[entry]), p_value(p_null[entry])]
        for entry in entries
    ]  # fmt: skip
    columns = [
        words("format"), Column(f"gain of {stiff}"), Column("on fine rungs"), Column("own part"), Column("p"),
        Column(f"own part of {null}"), Column("own part beyond it"), Column("p"),
    ]  # fmt: skip
    note = (
        f"Gains over `{plain}`, nats per token, with 95 % intervals over {seeds_of(losses)} seeds, each by itself; p "
        f"by Holm over the {len(entries)} formats. Fine rungs: a quantization grid of the same shape, 256 times finer."
    )
    above, below, _apart = sides(p_own, {entry: own[stiff, entry] for entry in entries})
    beyond, *_ = sides(p_null, against)
    said = [
        f"**H2.** The format's own part of the gain is above zero in {names(above)}; below in {names(below)}.",
        f"**H3.** It is larger than that of the null arm, whose steps know nothing of the weight, in {names(beyond)}.",
    ]
    return [*map(Text, said), Table(columns, rows, note)]


def splits(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What an arm gains in each format, and the format's own part of it, each with Holm over the formats."""
    formats = [name for name in values_of(losses, "format") if not name.startswith(VIRTUAL)]
    (arm,) = (name for name in values_of(losses, "optimizer") if name != plain)
    gains = {fmt: gains_over(losses, plain, arm, fmt) for fmt in formats}
    own = {fmt: gains[fmt] - gains_over(losses, plain, arm, VIRTUAL + fmt) for fmt in formats}
    said, p_own = own_by_format("H6", arm, own)
    p, told = told_apart(gains, f"`{plain}`", mark="")
    rows = [
        [f"**{fmt}**", with_interval(gains[fmt]), p_value(p[fmt]), with_interval(own[fmt]), p_value(p_own[fmt])]
        for fmt in formats
    ]
    columns = [words("format"), Column(f"gain of {arm}"), Column("p"), Column("own part"), Column("p")]
    note = (
        f"Gain over `{plain}`, nats per token, with 95 % intervals over {seeds_of(losses)} seeds, each "
        f"by itself; p by Holm over the {len(formats)} formats of a column. Own part: the gain minus that in the "
        "virtual twin."
    )
    return [said, Text(f"**H7.** `{arm}` ends {told}."), Table(columns, rows, note)]


def own_by_format(hypothesis: str, arm: str, own: dict[str, pd.Series]) -> tuple[Text, dict[str, float]]:
    """Say in which formats their own part of what ``arm`` gains is told apart, and return its p, by Holm over all."""
    p = holm({fmt: two_sided(part) for fmt, part in own.items()})
    above, below, apart = sides(p, own)
    found = f"above zero in {names(above)}; below in {names(below)}; not told apart in {names(apart)}"
    return Text(f"**{hypothesis}.** The format's own part of what `{arm}` gains is {found}."), p


def profile(losses: pd.Series, plain: str, folder: Path) -> list[Block]:
    """The map over knee and slope: gain of each at its best rate over the plain arm at its own; no claim."""
    runs = losses.groupby(["optimizer", "lr_scale"])
    means = runs.mean()[runs.size() == runs.size().max()]  # a rate at which a run diverged is none
    rate = means.groupby("optimizer").idxmin().map(lambda place: place[1])
    best = {arm: losses.xs((arm, rate[arm]), level=("optimizer", "lr_scale")).droplevel("format") for arm in rate.index}
    gains = {_place(arm): best[plain] - losses_of for arm, losses_of in best.items() if arm != plain}
    rates = {_place(arm): rate[arm] for arm in best if arm != plain}
    knees, slopes = (sorted({place[i] for place in gains}) for i in (0, 1))

    def cell(knee: float, slope: float) -> str:
        place = knee, slope
        return f"{with_interval(gains[place])} ({number(rates[place], 1)})" if place in gains else ""

    rows = [[f"**{slope:g}**", *(cell(knee, slope) for knee in knees)] for slope in slopes]
    columns = [words("slope"), *(Column(f"knee {knee:g}") for knee in knees)]
    seeds = len(best[plain])
    note = (
        f"Gain over `{plain}`, nats per token, each at the best of its rates (in brackets, as a multiple), with its "
        f"95 % interval over {seeds} seeds. The rate was chosen on the same seeds: a map, and no finding."
    )
    table = [[gains[knee, slope].mean() if (knee, slope) in gains else np.nan for knee in knees] for slope in slopes]
    draw_profile(np.array(table), slopes, knees, folder / "figures")
    alt = "Gain over AdamW by the knee and the slope of the step as a function of the weight"
    caption = f"Mean gain over {plain}, nats per token, {seeds} paired seeds, at the best of the rates tried."
    knee, slope = max(gains, key=lambda place: gains[place].mean())
    least = f"which gains {with_interval(gains[knee, slope])} over `{plain}`"
    said = Text(f"The lowest loss of a profile is that of knee {knee:g} and slope {slope:g}, {least}.")
    return [said, Picture("profile", alt, caption), Table(columns, rows, note)]


def controls(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """What looks at no format, each against the arm that follows the format's geometry."""
    return _each_against("H4", "stiff_matched", losses, plain)


def masterless(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """Ways to keep no master weights, each against stochastic rounding."""
    return _each_against("H5", "adamw_sr", losses, plain)


def corpus(losses: pd.Series, plain: str, _: Path) -> list[Block]:
    """The same with other texts, and the format's own part of what its geometry gains."""
    said, table = each_over_plain("C1", losses, plain)
    return [said, own_part("C2", losses, plain, "stiff_matched"), table]


def own_part(hypothesis: str, losses: pd.Series, plain: str, arm: str) -> Text:
    """What ``arm`` gains in the first format minus what it gains in its virtual twin: t over pairs."""
    entry = values_of(losses, "format")[0]
    gain, without = (gains_over(losses, plain, arm, name) for name in (entry, VIRTUAL + entry))
    own = gain - without
    p = two_sided(own)
    verdict = "not told apart from zero" if p >= LEVEL else "above zero" if mean(own) > 0 else "below zero"
    part = f"{with_interval(own)}, {stated_p(p)}, {verdict}"
    return Text(f"**{hypothesis}.** The format's own part of what `{arm}` gains: {part}.")


def _each_against(hypothesis: str, reference: str, losses: pd.Series, plain: str) -> list[Block]:
    """Every arm but the plain and the null one against ``reference`` in the first format, with Holm over them."""
    entries, arms = values_of(losses, "format"), values_of(losses, "optimizer")
    judged = [arm for arm in arms if arm not in (plain, reference) and "permuted" not in arm]

    def above(arm: str, entry: str) -> pd.Series:
        return -gains_over(losses, reference, arm, entry)

    p, told = told_apart({arm: -above(arm, entries[0]) for arm in judged}, f"`{reference}`")
    rows = [
        [f"`{arm}`", *(with_interval(above(arm, entry)) for entry in entries), p_value(p[arm]) if arm in p else "–"]
        for arm in arms
        if arm != reference
    ]
    columns = [words("arm"), *(Column(f"in {entry}") for entry in entries), Column("p")]
    note = (
        f"Final validation loss minus that of `{reference}` in the same format, nats per token, with its 95 % interval "
        f"over {seeds_of(losses)} seeds, each by itself; p in {entries[0]}, by Holm over the "
        f"{len(judged)} arms that have one."
    )
    return [Text(f"**{hypothesis}.** In {entries[0]}, {told}."), Table(columns, rows, note)]


def each_over_plain(hypothesis: str, losses: pd.Series, plain: str) -> list[Block]:
    """Every arm's gain in the first format, with Holm over the arms.

    Beside it, where the part has the format's virtual twin, how much of the gain is there without the format.
    """
    entry = values_of(losses, "format")[0]
    arms = [arm for arm in values_of(losses, "optimizer") if arm != plain]

    def gain(arm: str, name: str) -> pd.Series:
        return gains_over(losses, plain, arm, name)

    has_twin = VIRTUAL + entry in values_of(losses, "format")

    def beside(arm: str) -> list[str]:
        if not has_twin:
            return []
        without = gain(arm, VIRTUAL + entry)
        return [with_interval(without), with_interval(gain(arm, entry) - without)]

    p, told = told_apart({arm: gain(arm, entry) for arm in arms}, f"`{plain}`")
    rows = [[f"`{arm}`", with_interval(gain(arm, entry)), p_value(p[arm]), *beside(arm)] for arm in arms]
    columns = [words("arm"), Column(f"gain in {entry}"), Column("p")]
    columns += [Column("gain without it"), Column("own part")] if has_twin else []
    note = (
        f"Gain over `{plain}`, nats per token, with 95 % intervals over {seeds_of(losses)} seeds, each "
        f"by itself; p {f'by Holm over the {len(arms)} arms' if len(arms) > 1 else 'of a t-test over pairs'}."
    )
    return [Text(f"**{hypothesis}.** In {entry}, {told}."), Table(columns, rows, note)]


def told_apart(gains: dict[str, pd.Series], reference: str, mark: str = "`") -> tuple[dict[str, float], str]:
    """Return each gain's p value, by Holm over all, and which end lower or higher than ``reference``, in words.

    ``gains`` are of arms, named between two ``mark``, or of formats.
    """
    p = holm({name: two_sided(gain) for name, gain in gains.items()})
    lower, higher, apart = sides(p, gains)
    found = f"higher: {names(higher, mark)}; not told apart: {names(apart, mark)}"
    return p, f"lower than {reference}: {names(lower, mark)}; {found}"


def sides(p: dict[str, float], differences: dict[str, pd.Series]) -> tuple[list[str], list[str], list[str]]:
    """Return the names of those above zero, below it, and not told apart from it, by their p values."""
    told = [name for name in differences if p[name] < LEVEL]
    above, below = ([name for name in told if sign * mean(differences[name]) > 0] for sign in (1, -1))
    return above, below, [name for name in differences if name not in (*above, *below)]


def tested(gain: pd.Series) -> str:
    """Return a gain with its interval, its p and what it says, by a t-test over pairs."""
    p = two_sided(gain)
    verdict = "not told apart" if p >= LEVEL else "it ends lower" if mean(gain) > 0 else "it ends higher"
    return f"{with_interval(gain)}, {stated_p(p)}, {verdict}"


def gains_over(losses: pd.Series, plain: str, arm: str, entry: str) -> pd.Series:
    """Return what ``arm`` ends lower than ``plain`` in a format, by seed: so that what is paired has one seed.

    NaN for a seed of which one of the two has no loss.
    """
    of_format = losses.xs(entry, level="format")
    return of_format.xs(plain, level="optimizer") - of_format.xs(arm, level="optimizer")


def seeds_of(losses: pd.Series) -> int:
    """Return over how many seeds a part's intervals are, where no cell is lost."""
    return len(losses.index.unique("seed"))


def values_of(losses: pd.Series, level: str) -> list[str]:
    """Return the values of an index level in the order of the results, which is that of the grid."""
    return list(dict.fromkeys(losses.index.get_level_values(level)))


def _place(arm: str) -> tuple[float, float]:
    knee, slope = arm.removeprefix("knee").split("_slope")
    return float(knee), float(slope.replace("p", "."))


def names(entries: Sequence[str], mark: str = "") -> str:
    """Return ``entries`` as a sentence has them, between two ``mark``, or "none"."""
    return ", ".join(f"{mark}{entry}{mark}" for entry in entries) or "none"
