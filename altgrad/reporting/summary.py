"""The report's first screen: one sentence of result, and the tables that it stands on.

Each table has one fixed lead sentence; everything that depends on the numbers is a number.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import Comparison
from altgrad.reporting.decision_rule import (
    IDENTICAL,
    INCONCLUSIVE,
    LEVEL,
    NONE_SEEN,
    SEEDS,
    TOO_FEW,
    UNTESTED,
    Result,
    adjusted,
)
from altgrad.reporting.document import Block, Column, Table, Text, words
from altgrad.reporting.hypotheses import COST, GAIN
from altgrad.reporting.load import Study
from altgrad.reporting.statistics import Contrast, Difference, Run, outlier
from altgrad.reporting.wording import NONE, change, interval, joined, number, p_value, plural, significant

QUESTION = "Which 8-bit floating-point format gains most from geometry-aware updates, and why?"
SHOWN = 5  # of the runs of the lowest loss
EXPLAINED = "[why](../altgrad/reporting/STATISTICS.md)"
RULE = (
    "**Intervals are unadjusted, p is adjusted.** 95 % CI: Student's paired t, each comparison by itself, as "
    "`scipy.stats.ttest_rel` has it. p: of the same test, adjusted for all comparisons by Holm's step-down. The result "
    "follows p, so it may be inconclusive where the interval leaves out zero; p alone then stands beside it"
)


def title(study: Study, comparison: Comparison) -> tuple[str, str]:
    """Return the report's title and question: the bench's own where an optimizer follows a format's spacing."""
    if _aware(study, comparison):
        return "AltGrad report", QUESTION
    others = ", and what does each optimizer change" if comparison.references else ""
    return "AltGrad report: what the formats cost", f"What does each format cost{others}?"


def summary(
    study: Study, comparison: Comparison, chance: float | None = None, costs: str = "What each format costs", *,
    why: str = EXPLAINED,
) -> list[Block]:  # fmt: skip
    """Return the tables of the first screen, the first under ``costs``, the lines on certainty and on outliers.

    ``why`` names or links the page that explains the statistics.
    """
    methods = list(dict.fromkeys(row.optimizer for row in _changed(study, comparison)))
    blocks: list[Block] = []
    for lead, table in (
        (costs, costs_table(study, comparison)),
        (f"What {f'`{methods[0]}`' if len(methods) == 1 else 'each optimizer'} changes",
         updates_table(study, comparison)),
        (f"{'Highest' if study.measure.higher_is_better else 'Lowest'} {study.measure.noun}",
         lowest_table(study, comparison)),
    ):  # fmt: skip
        if table is not None:
            blocks += [Text(f"**{lead}**"), table]
    rule = [f"{RULE} ({why})."] if comparison.answers.claims else []
    return [*blocks, *map(Text, [certainty(study, comparison, chance), *rule, *outliers(study, comparison)])]


def _aware(study: Study, comparison: Comparison) -> list[str]:
    """Return the optimizers that follow a format's spacing and have a reference, without controls."""
    arms = {name: study.arm(name) for name in comparison.references}
    return [name for name, arm in arms.items() if roles.follows_spacing(arm) and not roles.is_control(arm)]


def headline(study: Study, comparison: Comparison) -> str:
    """Return the result in a sentence: which formats gain by their own spacing, or what came of each comparison."""
    aware = _aware(study, comparison)
    if not aware:
        return outcomes(study, comparison)
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
    untested = list(dict.fromkeys(result.outcome for result in asked.values()))
    if set(untested) <= set(UNTESTED):
        return f"**Open.** A gain by the own spacing of {joined(list(asked))} under `{aware[0]}`: {joined(untested)}."
    none = [name for name, result in asked.items() if result.outcome in NONE_SEEN]
    equal = f" In {joined(none)} it is shown to be none (within ±{measure.smallest_effect:g})." if none else ""
    return f"**No format is seen to gain by its own spacing**, of {joined(list(asked))} under `{aware[0]}`.{equal}"


def outcomes(study: Study, comparison: Comparison) -> str:
    """Return which entries and optimizers were better, worse, without effect, inconclusive, or not tested.

    Those that are no controls count, and of optimizers the entries that are none.
    """
    named: dict[str, dict[str, list[str]]] = {}
    for (kind, entry, *arm), result in comparison.answers.claims.items():
        if kind in (COST, GAIN) and not result.exploratory and roles.is_quantized(study, entry):
            places = named.setdefault(result.outcome, {}).setdefault(arm[0] if arm else entry, [])
            places += [f"`{entry}`"] if arm and len(study.formats) > 1 else []
    if study.baseline is None and not named:
        return f"**Nothing is compared**: `{study.params['grid']['baseline']}`, the baseline, is not in the grid."
    if not named:
        return "**Nothing is compared**: no run and its reference completed with the same seed."
    better, worse = study.measure.outcomes
    labels = {better: "Better than the reference", worse: "Worse", TOO_FEW: TOO_FEW}
    said = []
    for outcome in named if set(named) <= set(UNTESTED) else dict.fromkeys([better, worse, *named]):
        groups = named.get(outcome, {}).items()
        found = [f"`{name}`" + (f" in {joined(places)}" if places else "") for name, places in groups]
        said.append(f"{labels.get(outcome, outcome.capitalize())}: {'; '.join(found) or 'none'}.")
    return " ".join([f"**{said[0]}**", *said[1:]])


def costs_table(study: Study, comparison: Comparison) -> Table | None:
    """What each format's loss is above the baseline's under the baseline optimizer."""
    measure, optimizer = study.measure, comparison.reference
    found = {entry: result for entry in study.formats if (result := comparison.answers.of(COST, entry)) is not None}
    note = f"{measure.delta}: final {measure.full} minus `{study.baseline}`'s under `{optimizer}`"
    note += ", its plain form there" if found and roles.is_plain_in(study, str(study.baseline), str(optimizer)) else ""
    note = f"{measure.with_unit(note)}."
    pairs = [f"`{a}` and `{b}`" for a, b in itertools.combinations(found, 2) if _bias_alone(study, comparison, a, b)]
    note += f" The runs of {joined(pairs)} are identical: a dynamic scale undoes a difference in bias." if pairs else ""
    return Table.of(
        [words(measure.entry), *heads(measure.delta)],
        [([f"**{entry}**", *cells(result)], {"format": entry, "optimizer": optimizer})
         for entry, result in found.items()], note,
    )  # fmt: skip


def _bias_alone(study: Study, comparison: Comparison, *entries: str) -> bool:
    """Whether two entries quantize to formats that differ in bias alone, and their runs are equal to the last bit."""
    used = (study.entry(entry).get("formats", {}).values() for entry in entries)
    formats = {tuple(sorted(repr({**fmt, "name": "", "bias": 0}) for fmt in own)) for own in used}
    rows = {comparison.runs.place[comparison.best_runs[entry, comparison.reference or ""]] for entry in entries}
    return len(rows) == len(formats) == 1 and formats != {()}


def _changed(study: Study, comparison: Comparison) -> list[Any]:
    """Return the rows of ``comparison.gains`` that the first screen shows: of no control, where anything is quantized.
    """
    return [
        row for row in comparison.gains.dropna(subset="claim").itertuples()
        if not roles.is_control(study.arm(row.optimizer)) and roles.is_quantized(study, row.format)
    ]  # fmt: skip


def updates_table(study: Study, comparison: Comparison) -> Table | None:
    """What each optimizer changes in each format, and what its controls leave of that."""
    kept = _changed(study, comparison)
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
    minus = dict.fromkeys(f"`{row.optimizer}`'s minus `{row.reference}`'s" for row in kept)
    note = f"{study.measure.delta}: {joined(list(minus))}, in the same {entry}."
    if own:
        note += f" {entry.capitalize()}-specific effect: that minus the same in the control (difference in differences)"
        note += f", {joined(twins)}."
    return Table.of(columns, rows, note)


def heads(delta: str) -> list[Column]:
    """Return the columns of `cells`."""
    return [Column(delta), words("result"), Column("p"), words("95 % CI"), Column("n")]


def cells(result: Result) -> list[str]:
    """Return a result as the cells of a table: Δ loss, what it amounts to, p, interval and n."""
    return [
        change(result.difference), outcome(result),
        NONE if result.outcome in (*UNTESTED, IDENTICAL) else p_value(result.adjusted), interval(result.difference),
        str(result.difference.n),
    ]  # fmt: skip


def outcome(result: Result) -> str:
    """Return what a result amounts to; with an inconclusive one the effect that would have been seen."""
    said = f"**{result.outcome}**" if result.significant else result.outcome
    said += f" ({number(result.visible, 4)})" if result.outcome == INCONCLUSIVE else ""
    apart = result.outcome not in UNTESTED and result.alone <= LEVEL < result.adjusted
    said += f", p alone {p_value(result.alone)}" if apart else ""
    return f"{said}, exploratory" if result.exploratory else said


def _short(result: Result | None) -> str:
    if result is None or result.outcome == IDENTICAL:
        return NONE if result is None else IDENTICAL
    return f"{change(result.difference)} {interval(result.difference)} {outcome(result)}"


class Lowest(NamedTuple):
    """A run at its best rate, its mean loss, and its difference to the best, with p where there is a test."""

    run: Run
    loss: float
    difference: Difference | None
    adjusted: float


def lowest(study: Study, comparison: Comparison) -> list[Lowest]:
    """Return the quantized formats and optimizers from the best mean loss on.

    The best is picked because it is that, so every pair counts as a comparison: p-values by Holm over all pairs.
    """
    ordered, runs = ranked(study, comparison), comparison.runs
    contrasts: dict[tuple[Run, Run], Contrast] = {(a, b): {b: 1, a: -1} for a, b in itertools.combinations(ordered, 2)}
    found = {pair: known for pair, row in contrasts.items() if (known := runs.difference(row)) is not None}
    levels = adjusted({pair: known.p_value() for pair, known in found.items() if known.sd > 0})
    enough = {pair for pair in levels if found[pair].n >= SEEDS and len(study.lr_scales) == 1}
    return [
        Lowest(run, float(runs.of_run(run).mean()), found.get(pair), levels[pair] if pair in enough else math.nan)
        for run in ordered for pair in [(ordered[0], run)]
    ]


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
    tested = any(row.adjusted == row.adjusted for row in shown)
    columns = [words(measure.entry), words("optimizer"), Column(from_best), *[Column("p")] * tested,
               Column(measure.noun)]  # fmt: skip
    rows = [(
        [f"**{row.run[0]}**", row.run[1], change(row.difference), *[p_value(row.adjusted)] * tested,
         number(row.loss, 4)], {"format": row.run[0], "optimizer": row.run[1]},
    ) for row in shown]  # fmt: skip
    pairs = plural(len(found) * (len(found) - 1) // 2, "pair")
    note = f"The first {len(rows)} of {len(found)}"
    note += f"; p adjusted over {'all ' if len(found) > 2 else ''}{pairs}." if tested else "."
    others = [f"`{entry}`" for entry in study.formats if not roles.is_quantized(study, entry)]
    return Table.of(columns, rows, note + (f" Not ranked, without quantization: {joined(others)}." if others else ""))


def certainty(study: Study, comparison: Comparison, chance: float | None) -> str:
    """Return one line: seeds, the number of comparisons, how often chance alone gives a result, the noise floor."""
    seeds = comparison.answers.paired_seeds
    if seeds is None:
        return "No two runs are compared on a seed that both completed."
    claims = comparison.answers.claims
    asked = sum(result.adjusted == result.adjusted for result in claims.values())
    found = {claim.outcome for q, claim in claims.items() if roles.is_quantized(study, q[1]) and not claim.exploratory}
    paired = str(seeds[0]) if seeds[0] == seeds[1] else f"{seeds[0]} to {seeds[1]}"
    lacking = "" if asked else "; no difference varies between them"
    lacking = f", of the {SEEDS} that a test takes" if seeds[1] < SEEDS else lacking
    tested = not found <= {*UNTESTED, IDENTICAL}
    said = [f"Paired seeds: {paired}{lacking}."] if not tested else [(
        f"Paired seeds: {paired}; p is adjusted over {plural(asked, 'comparison')}, significant up to {LEVEL:g} with "
        f"{SEEDS} seeds."
    )]  # fmt: skip
    if INCONCLUSIVE in found:
        said.append("Inconclusive: the effect in brackets would have been found nine times in ten, by itself.")
    if tested and chance is not None:
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
