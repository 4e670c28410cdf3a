"""The report's first screen: one sentence of result, and the tables that it stands on.

Each table has one fixed lead sentence; everything that depends on the numbers is a number.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np

from altgrad.reporting import roles
from altgrad.reporting.claims import COST
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Block, Column, Table, Text, words
from altgrad.reporting.load import Study
from altgrad.reporting.multiplicity import adjusted
from altgrad.reporting.results import INCONCLUSIVE, LEVEL, NO_EFFECT, SEEDS, Result
from altgrad.reporting.runs import Contrast, Run
from altgrad.reporting.statistics import outlier
from altgrad.reporting.wording import NONE, interval, joined, number, p_value, plural, signed, significant

QUESTION = "Which 8-bit floating-point format gains most from geometry-aware updates, and why?"
SHOWN = 5  # of the runs of the lowest loss
EXPLAINED = "[why](../altgrad/reporting/STATISTICS.md)"
RULE = (
    "**Intervals are unadjusted, p is adjusted.** 95 % CI: Student's paired t, each comparison by itself, as "
    "`scipy.stats.ttest_rel` has it. p: of the same test, adjusted for all comparisons by Holm's step-down. The result "
    "follows p, so it may be inconclusive where the interval leaves out zero; p alone then stands beside it"
)


def summary(
    study: Study, comparison: Comparison, chance: float | None = None, costs: str = "What each format costs",
    changes: str = "What the spacing-scaled update changes", *, why: str = EXPLAINED,
) -> list[Block]:  # fmt: skip
    """Return the tables of the first screen, two of them under these leads, the lines on certainty and on outliers.

    ``why`` names or links the page that explains the statistics.
    """
    others = "What optimizers that do not follow the format's spacing change"
    blocks: list[Block] = []
    for lead, table in (
        (costs, costs_table(study, comparison)),
        (changes, updates_table(study, comparison, follow_spacing=True)),
        (others, updates_table(study, comparison, follow_spacing=False)),
        (f"{'Highest' if study.measure.higher_is_better else 'Lowest'} {study.measure.noun}",
         lowest_table(study, comparison)),
    ):  # fmt: skip
        if table is not None:
            blocks += [Text(f"**{lead}**"), table]
    lines = [certainty(study, comparison, chance), f"{RULE} ({why}).", *outliers(study, comparison)]
    return [*blocks, *map(Text, lines)]


def headline(study: Study, comparison: Comparison) -> str:
    """Return the result in a sentence: which formats gain by their own spacing."""
    arms = {name: study.arm(name) for name in comparison.references}
    aware = [name for name, arm in arms.items() if roles.follows_spacing(arm) and not roles.is_control(arm)]
    if not aware:
        return "**Open.** This grid has no geometry-aware optimizer with a baseline optimizer beside it."
    asked = {
        row.format: row.beyond
        for row in comparison.gains.itertuples()
        if row.optimizer == aware[0] and roles.is_quantized(study, row.format) and row.beyond is not None
    }
    if not asked:
        return (
            "**Open.** Without an unquantized control (`virtual.` and the format's name in `grid.formats`) a gain is "
            "not known to be the format's."
        )
    measure = study.measure
    own = [name for name, result in asked.items() if result.outcome == measure.outcomes[0]]
    if own:
        does = f"{'raises' if measure.higher_is_better else 'lowers'} the {measure.noun} more"
        return f"**`{aware[0]}` has a format-specific effect in {joined(own)}**: there it {does}."
    none = [name for name, result in asked.items() if result.outcome == NO_EFFECT]
    equal = f" In {joined(none)} it is shown to be none (within ±{measure.smallest_effect:g})." if none else ""
    return f"**No format is seen to gain by its own spacing**, of {joined(list(asked))} under `{aware[0]}`.{equal}"


def costs_table(study: Study, comparison: Comparison) -> Table | None:
    """What each format's loss is above the baseline's under the baseline optimizer."""
    measure, optimizer = study.measure, comparison.reference
    found = [(entry, result) for entry in study.formats if (result := comparison.answers.of(COST, entry)) is not None]
    note = f"{measure.delta}: final {measure.full} minus `{study.baseline}`'s under `{optimizer}`"
    return Table.of(
        [words(measure.entry), *heads(measure.delta)],
        [([f"**{entry}**", *cells(result)], {"format": entry, "optimizer": optimizer}) for entry, result in found],
        f"{measure.with_unit(note)}.",
    )


def updates_table(study: Study, comparison: Comparison, *, follow_spacing: bool) -> Table | None:
    """What each optimizer, of those that follow a format's spacing or of the others, changes in each format, and what
    its controls leave of that."""
    kept = [
        row for row in comparison.gains.dropna(subset="claim").itertuples()
        if not roles.is_control(arm := study.arm(row.optimizer)) and roles.is_quantized(study, row.format)
        and roles.follows_spacing(arm) == follow_spacing
    ]  # fmt: skip
    if not kept:
        return None
    several = len({row.optimizer for row in kept}) > 1
    twins = list(dict.fromkeys(f"`{row.twin}`" for row in kept if row.beyond is not None))
    own, held_against = bool(twins), any(row.controls for row in kept)
    entry = study.measure.entry
    columns = [words(entry), *[words("optimizer")] * several, *heads(study.measure.delta),
               *[words(f"{entry}-specific effect")] * own, *[words("against controls")] * held_against]  # fmt: skip
    rows = [(
        [
            f"**{row.format}**", *[row.optimizer] * several, *cells(row.claim), *[_short(row.beyond)] * own,
            *[", ".join(f"{name} {_short(result)}" for name, result in row.controls.items()) or NONE] * held_against,
        ], {"format": row.format, "optimizer": [row.optimizer, row.reference]},
    ) for row in kept]  # fmt: skip
    held = joined(list(dict.fromkeys(f"`{row.reference}`" for row in kept)))
    of = "each optimizer's" if several else f"`{kept[0].optimizer}`'s"
    note = f"{study.measure.delta}: {of} minus {held}'s in the same {entry}."
    if own:
        note += f" {entry.capitalize()}-specific effect: that minus the same in the control (difference in differences)"
        note += f", {joined(twins)}."
    return Table.of(columns, rows, note)


def heads(delta: str) -> list[Column]:
    """Return the columns of `cells`."""
    return [Column(delta), words("95 % CI"), Column("p"), Column("n"), words("result")]


def cells(result: Result) -> list[str]:
    """Return a result as the cells of a table: Δ loss, interval, p, n and what it amounts to."""
    return [
        signed(result.difference.mean, 4), interval(result.difference), p_value(result.adjusted),
        str(result.difference.n), outcome(result),
    ]  # fmt: skip


def outcome(result: Result) -> str:
    """Return what a result amounts to; with an inconclusive one the effect that would have been seen."""
    said = f"**{result.outcome}**" if result.significant else result.outcome
    said += f" ({number(result.visible, 4)})" if result.outcome == INCONCLUSIVE else ""
    said += f", p alone {p_value(result.alone)}" if result.alone <= LEVEL < result.adjusted else ""
    return f"{said}, exploratory" if result.exploratory else said


def _short(result: Result | None) -> str:
    if result is None:
        return NONE
    return f"{signed(result.difference.mean, 4)} {interval(result.difference)} {outcome(result)}"


class Lowest(NamedTuple):
    """A run at its best rate, its mean loss, and by how much it differs from the best, with p; none for that itself."""

    run: Run
    loss: float
    above: float
    adjusted: float


def lowest(study: Study, comparison: Comparison) -> list[Lowest]:
    """Return the quantized formats and optimizers from the best mean loss on.

    The best is picked because it is that, so every pair counts as a comparison: p-values by Holm over all pairs.
    """
    ordered, runs = ranked(study, comparison), comparison.runs
    contrasts: dict[tuple[Run, Run], Contrast] = {(a, b): {a: 1, b: -1} for a, b in itertools.combinations(ordered, 2)}
    found = {pair: known for pair, contrast in contrasts.items()
             if (known := runs.difference(contrast)) is not None and not known.is_zero}  # fmt: skip
    levels = adjusted({pair: known.p_value() for pair, known in found.items() if known.sd > 0})
    return [
        Lowest(
            run, float(runs.of_run(run).mean()),
            -found[pair].mean if (pair := (ordered[0], run)) in found else 0.0, levels.get(pair, math.nan),
        ) for run in ordered
    ]  # fmt: skip


def ranked(study: Study, comparison: Comparison) -> list[Run]:
    """Return the quantized entries and arms at their best rates, of which a seed completed, the best mean loss first.

    Those of fewer seeds than can be significant come last, where others have more: few seeds are easily lucky. Means
    are over the seeds that all of these have, or each one's own if they share none: one that lost a seed in which all
    are high would else look lower than it is.
    """
    runs, sign = comparison.runs, -1 if study.measure.higher_is_better else 1
    candidates = [run for (entry, _), run in comparison.best_runs.items() if roles.is_quantized(study, entry)]
    found: list[Run] = []
    for fewest, below in ((SEEDS, math.inf), (1, SEEDS)):
        group = [run for run in candidates if fewest <= runs.completed(run) < below]
        if group:
            table = sign * np.array([runs.of_run(run) for run in group])
            shared = np.isfinite(table).all(axis=0)
            means = table[:, shared].mean(axis=1) if shared.any() else np.nanmean(table, axis=1)
            found += [group[place] for place in np.argsort(means, kind="stable")]
    return found


def lowest_table(study: Study, comparison: Comparison) -> Table | None:
    """The runs of the best loss, and by how much each differs from the first."""
    found = lowest(study, comparison)
    if len(found) < 2:
        return None
    measure, shown = study.measure, found[:SHOWN]
    from_best = "minus the highest" if measure.higher_is_better else "above the lowest"
    columns = [words(measure.entry), words("optimizer"), Column(measure.noun), Column(from_best), Column("p")]
    rows = [
        ([f"**{row.run[0]}**", row.run[1], number(row.loss, 4), signed(row.above, 4) if i else NONE,
          p_value(row.adjusted) if i else NONE], {"format": row.run[0], "optimizer": row.run[1]})
        for i, row in enumerate(shown)
    ]  # fmt: skip
    pairs = plural(len(found) * (len(found) - 1) // 2, "pair")
    note = f"The first {len(rows)} of {len(found)}; p adjusted over {'all ' if len(found) > 2 else ''}{pairs}."
    return Table.of(columns, rows, note)


def certainty(study: Study, comparison: Comparison, chance: float | None) -> str:
    """Return one line: seeds, the number of comparisons, how often chance alone gives a result, the noise floor."""
    seeds = comparison.answers.paired_seeds
    if seeds is None:
        return "No two runs are compared on a seed that both completed."
    asked = sum(result.adjusted == result.adjusted for result in comparison.answers.claims.values())
    paired = str(seeds[0]) if seeds[0] == seeds[1] else f"{seeds[0]} to {seeds[1]}"
    lacking = f", of the {SEEDS} that a test takes" if seeds[1] < SEEDS else "; no difference varies between them"
    said = [f"Paired seeds: {paired}{lacking}."] if not asked else [(
        f"Paired seeds: {paired}; p is adjusted over {plural(asked, 'comparison')}, significant up to {LEVEL:g} with "
        f"{SEEDS} seeds; inconclusive: the effect in brackets would have been found nine times in ten, by itself."
    )]  # fmt: skip
    if asked and chance is not None:
        said.append(f"Of simulated studies like this one, of chance alone, {100 * chance:.1f} % find any.")
    if comparison.noise_floor > 0:
        said.append(f"The 95 % interval of a cost is ±{significant(comparison.noise_floor)} at the median.")
    return " ".join(said)


def outliers(study: Study, comparison: Comparison) -> list[str]:
    """Return a line that names each run that one seed ends far from the others of, by Grubbs' test; none without any.

    They stay in every mean. The 5 % of a false line are shared by all runs.
    """
    runs, said, named = comparison.runs, [], set()
    for run in comparison.best_runs.values():
        losses = runs.losses[runs.place[run]]
        place, p = outlier(losses)
        if p * len(runs.losses) <= LEVEL and runs.place[run] not in named:
            named.add(runs.place[run])
            others = np.delete(losses, place)
            said.append(
                f"`{run[0]}` under `{run[1]}` with seed {study.seeds[place]} has {significant(losses[place], 5)}, its "
                f"other seeds {number(np.nanmin(others), 4)} to {number(np.nanmax(others), 4)}"
            )
    widens = "Each widens the intervals of its own comparisons and of no others (Grubbs' test)."
    return [f"**Outlier**: {'; '.join(said)}. {widens}"] if said else []
