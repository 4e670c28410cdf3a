"""The report's first screen: the result in a sentence, and the tables that it rests on.

Each table has one fixed lead sentence, and what depends on the results is a number or a name.
"""

import itertools
import math
from typing import Any

import numpy as np

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import COST, GAIN, Comparison
from altgrad.reporting.load import Study
from altgrad.reporting.markdown import NONE, Block, Column, Table, listed, number, plural, significant, words
from altgrad.reporting.statistics import (
    IDENTICAL,
    INCONCLUSIVE,
    LEVEL,
    NONE_SEEN,
    SEEDS,
    TOO_FEW,
    UNTESTED,
    Run,
    adjusted,
    outlier,
)
from altgrad.reporting.tables import brief, cells, change, heads, p_value

QUESTION = "Which 8-bit floating-point format gains most from geometry-aware updates, and why?"
SHOWN = 5  # the most rows of `lowest_table`
EXPLAINED = "[why](../altgrad/reporting/STATISTICS.md)"
RULE = (
    "**Intervals are unadjusted, p is adjusted.** A 95 % CI is that of Student's paired t-test for one comparison "
    "alone (`scipy.stats.ttest_rel`). p is that of the same test, adjusted over all comparisons by Holm's step-down "
    "method. The result follows p, so it can be inconclusive although the interval excludes zero; the unadjusted p "
    "(\"p alone\") then stands beside it"
)


def title(study: Study, comparison: Comparison) -> tuple[str, str]:
    """Return the report's title and its question: `QUESTION` if an optimizer follows a format's spacing."""
    if roles.spacing_methods(study):
        return "AltGrad report", QUESTION
    others = ", and what does each optimizer change" if comparison.references else ""
    return "AltGrad report: what the formats cost", f"What does each format cost{others}?"


def summary(
    study: Study, comparison: Comparison, chance: float | None = None, costs: str = "What each format costs", *,
    why: str = EXPLAINED,
) -> list[Block]:  # fmt: skip
    """Return the tables of the first screen, and paragraphs on certainty and outliers.

    Args:
        study, comparison: what is reported.
        chance: the share of simulated studies without any effect that have a significant result; ``None`` if not known.
        costs: the lead sentence of the first table.
        why: the name of the page that explains the statistics, or a link to it.
    """
    methods = list(dict.fromkeys(row.optimizer for row in _changed(study, comparison)))
    blocks: list[Block] = []
    for lead, table in (
        (costs, costs_table(study, comparison)),
        (f"What {f'`{methods[0]}`' if len(methods) == 1 else 'each optimizer'} changes",
         gains_table(study, comparison)),
        (f"{'Highest' if study.primary.higher_is_better else 'Lowest'} {study.primary.noun}",
         lowest_table(study, comparison)),
    ):  # fmt: skip
        if table is not None:
            blocks += [f"**{lead}**", table]
    rule = [f"{RULE} ({why})."] if comparison.claims else []
    return [*blocks, certainty(study, comparison, chance), *rule, *outliers(study, comparison)]


def headline(study: Study, comparison: Comparison) -> str:
    """Return the result in a sentence: which formats gain by their own spacing, or the outcome of each comparison."""
    aware = roles.spacing_methods(study)
    if not aware:
        return outcomes(study, comparison)
    effects = {
        row.format: row.beyond
        for row in comparison.gains.itertuples()
        if row.optimizer == aware[0] and roles.is_quantized(study, row.format) and row.beyond is not None
    }
    if not effects:
        return (
            "**Open.** Without an unquantized control (`virtual.` and the format's name in `grid.formats`) a gain is "
            "not known to be the format's."
        )
    metric = study.primary
    specific = [name for name, result in effects.items() if result.outcome == metric.outcomes[0]]
    if specific:
        does = f"{'raises' if metric.higher_is_better else 'lowers'} the {metric.noun} more"
        return f"**`{aware[0]}` has a format-specific effect in {listed(specific)}**: there it {does}."
    outcome_names = dict.fromkeys(result.outcome for result in effects.values())
    if set(outcome_names) <= set(UNTESTED):
        return f"**Open.** A gain by the own spacing of {listed(effects)} under `{aware[0]}`: {listed(outcome_names)}."
    none = [name for name, result in effects.items() if result.outcome in NONE_SEEN]
    equal = f" In {listed(none)} an effect beyond ±{metric.smallest_effect:g} is excluded." if none else ""
    return f"**No format gained by its own spacing**: {listed(effects)} under `{aware[0]}`.{equal}"


def outcomes(study: Study, comparison: Comparison) -> str:
    """Return sentences that name the entries and optimizers with each outcome, such as better, worse or inconclusive.

    Controls are left out.
    """
    named: dict[str, dict[str, list[str]]] = {}
    for (kind, entry, *arm), result in comparison.claims.items():
        if kind in (COST, GAIN) and not result.exploratory and roles.is_quantized(study, entry):
            places = named.setdefault(result.outcome, {}).setdefault(arm[0] if arm else entry, [])
            places += [f"`{entry}`"] if arm and len(study.formats) > 1 else []
    if study.baseline is None and not named:
        return f"**Nothing is compared**: `{study.params['grid']['baseline']}`, the baseline, is not in the grid."
    if not named:
        return "**Nothing is compared**: no run and its reference completed with the same seed."
    better, worse = study.primary.outcomes
    labels = {better: "Better than the reference", worse: "Worse", TOO_FEW: TOO_FEW}
    texts = []
    for kind in named if set(named) <= set(UNTESTED) else dict.fromkeys([better, worse, *named]):
        groups = named.get(kind, {}).items()
        members = [f"`{name}`" + (f" in {listed(places)}" if places else "") for name, places in groups]
        texts.append(f"{labels.get(kind, kind.capitalize())}: {'; '.join(members) or 'none'}.")
    return " ".join([f"**{texts[0]}**", *texts[1:]])


def costs_table(study: Study, comparison: Comparison) -> Table | None:
    """Return a row per format: its cost, which is its loss minus the baseline's under the baseline optimizer."""
    metric, optimizer = study.primary, comparison.reference
    costs = {entry: result for entry in study.formats if (result := comparison.claims.get((COST, entry))) is not None}
    if not costs:
        return None
    note = f"{metric.delta}: final {metric.full} minus `{study.baseline}`'s under `{optimizer}`"
    note += ", its plain form there" if roles.is_plain_in(study, str(study.baseline), str(optimizer)) else ""
    note = f"{metric.with_unit(note)}."
    pairs = [f"`{a}` and `{b}`" for a, b in itertools.combinations(costs, 2) if _bias_alone(study, comparison, a, b)]
    note += f" The runs of {listed(pairs)} are identical: a dynamic scale undoes a difference in bias." if pairs else ""
    rows = [[f"**{entry}**", *cells(result)] for entry, result in costs.items()]
    return Table([words(metric.entry), *heads(metric.delta)], rows, note)


def _bias_alone(study: Study, comparison: Comparison, *entries: str) -> bool:
    """Return whether two entries quantize to formats that differ in bias alone, and their runs are equal bit by bit."""
    used = (study.entry(entry).get("formats", {}).values() for entry in entries)
    formats = {tuple(sorted(repr({**fmt, "name": "", "bias": 0}) for fmt in fields)) for fields in used}
    rows = {comparison.runs.place[comparison.best_runs[entry, comparison.reference or ""]] for entry in entries}
    return len(rows) == len(formats) == 1 and formats != {()}


def _changed(study: Study, comparison: Comparison) -> list[Any]:
    """Return the rows of ``comparison.gains`` in quantized entries, without controls: those of the first screen."""
    return [
        row for row in comparison.gains.dropna(subset="claim").itertuples()
        if not roles.role_of(study.arm(row.optimizer)).control and roles.is_quantized(study, row.format)
    ]  # fmt: skip


def gains_table(study: Study, comparison: Comparison) -> Table | None:
    """Return a row per format and optimizer: Δ to its reference, format-specific effect, and Δ to its controls."""
    gains, entry = _changed(study, comparison), study.primary.entry
    if not gains:
        return None
    several = len({row.optimizer for row in gains}) > 1
    twins = list(dict.fromkeys(f"`{row.twin}`" for row in gains if row.beyond is not None))
    specific, controlled = bool(twins), any(row.controls for row in gains)
    columns = [words(entry), *[words("optimizer")] * several, *heads(study.primary.delta),
               *[words(f"{entry}-specific effect")] * specific, *[words("against controls")] * controlled]  # fmt: skip
    rows = [[
        f"**{row.format}**", *[row.optimizer] * several, *cells(row.claim), *[brief(row.beyond)] * specific,
        *[", ".join(f"{name} {brief(result)}" for name, result in row.controls.items()) or NONE] * controlled,
    ] for row in gains]  # fmt: skip
    minus = dict.fromkeys(f"`{row.optimizer}`'s minus `{row.reference}`'s" for row in gains)
    note = f"{study.primary.delta}: {listed(minus)}, in the same {entry}."
    if specific:
        note += f" {entry.capitalize()}-specific effect: that minus the same in the control (difference in differences)"
        note += f", {listed(twins)}."
    return Table(columns, rows, note)


def ranked(study: Study, comparison: Comparison) -> list[Run]:
    """Return the quantized runs at their best rates with a completed seed, in order of mean loss, the best first.

    Runs with too few seeds for a test come last: few seeds are easily lucky. Means are over the seeds that all runs
    completed: a run that lost a seed of high losses would else look better. Without such seeds, each run's own count.
    """
    runs, sign = comparison.runs, -1 if study.primary.higher_is_better else 1
    candidates = [run for (entry, _), run in comparison.best_runs.items() if roles.is_quantized(study, entry)]
    order: list[Run] = []
    for fewest, below in ((SEEDS, math.inf), (1, SEEDS)):
        group = [run for run in candidates if fewest <= runs.completed(run) < below]
        if group:
            table = sign * np.array([runs.of_run(run) for run in group])
            shared = np.isfinite(table).all(axis=0)
            means = table[:, shared].mean(axis=1) if shared.any() else np.nanmean(table, axis=1)
            order += [group[place] for place in np.argsort(means, kind="stable")]
    return order


def lowest_table(study: Study, comparison: Comparison) -> Table | None:
    """Return a row for each of the best runs, with its difference to the first; None for fewer than two runs.

    The first is picked by its loss, so every pair counts as a comparison: p is adjusted by Holm over all pairs.
    """
    order, runs, metric = ranked(study, comparison), comparison.runs, study.primary
    if len(order) < 2:
        return None
    pairs = list(itertools.combinations(order, 2))
    contrasts = {(a, b): runs.difference({b: 1, a: -1}) for a, b in pairs}
    differences = {pair: difference for pair, difference in contrasts.items() if difference is not None}
    levels = adjusted({pair: difference.p_value() for pair, difference in differences.items() if difference.sd > 0})
    tested = {pair for pair in levels if differences[pair].n >= SEEDS and len(study.lr_scales) == 1}
    first = {run: (order[0], run) for run in order[:SHOWN]}  # with its pair
    with_p = not tested.isdisjoint(first.values())
    from_best = "minus the highest" if metric.higher_is_better else "above the lowest"
    columns = [words(metric.entry), words("optimizer"), Column(from_best), *[Column("p")] * with_p, Column(metric.noun)]
    rows = [
        [f"**{run[0]}**", run[1], change(differences.get(pair)),
         *[p_value(levels[pair] if pair in tested else None)] * with_p, number(runs.of_run(run).mean(), 4)]
        for run, pair in first.items()
    ]  # fmt: skip
    note = f"The first {len(rows)} of {len(order)}"
    note += f"; p adjusted over {'all ' if len(order) > 2 else ''}{plural(len(pairs), 'pair')}." if with_p else "."
    others = [f"`{entry}`" for entry in study.formats if not roles.is_quantized(study, entry)]
    note += f" Not ranked, since nothing is quantized: {listed(others)}." if others else ""
    return Table(columns, rows, note)


def certainty(study: Study, comparison: Comparison, chance: float | None) -> str:
    """Return one line: seeds, the number of comparisons, how often chance alone gives a result, the noise floor."""
    seeds, claims = comparison.paired_seeds, comparison.claims
    if seeds is None:
        return "No two runs are compared on a seed that both completed."
    asked = sum(result.adjusted == result.adjusted for result in claims.values())
    kinds = {claim.outcome for q, claim in claims.items() if roles.is_quantized(study, q[1]) and not claim.exploratory}
    paired = str(seeds[0]) if seeds[0] == seeds[1] else f"{seeds[0]} to {seeds[1]}"
    tested = not kinds <= {*UNTESTED, IDENTICAL}
    if tested:
        over = f"p is adjusted over {plural(asked, 'comparison')}, significant up to {LEVEL:g} with {SEEDS} seeds"
        texts = [f"Paired seeds: {paired}; {over}."]
    else:
        lacking = "" if asked else "; no difference varies between them"
        texts = [f"Paired seeds: {paired}{f', of the {SEEDS} that a test takes' if seeds[1] < SEEDS else lacking}."]
    if INCONCLUSIVE in kinds:
        texts.append("Inconclusive: in brackets, the effect that this comparison alone would detect nine times in ten.")
    if tested and chance is not None:
        texts.append(f"Of simulated studies of this size without any effect, {100 * chance:.1f} % report one.")
    if comparison.noise_floor > 0:
        texts.append(f"The median 95 % interval of a cost is ±{significant(comparison.noise_floor)}.")
    return " ".join(texts)


def outliers(study: Study, comparison: Comparison) -> list[str]:
    """Return a paragraph that names each run with an outlier seed by Grubbs' test, in a list; empty without any.

    Outliers stay in every mean. The level of 5 % is divided among all runs.
    """
    runs, texts, named = comparison.runs, [], set()
    for run in comparison.best_runs.values():
        losses = runs.losses[runs.place[run]]
        place, p = outlier(losses)
        if p * len(runs.losses) <= LEVEL and runs.place[run] not in named:
            named.add(runs.place[run])
            others = np.delete(losses, place)
            texts.append(
                f"`{run[0]}` under `{run[1]}` with seed {study.seeds[place]} has {significant(losses[place], 5)}, its "
                f"other seeds {number(np.nanmin(others), 4)} to {number(np.nanmax(others), 4)}"
            )
    widens = "Each widens the intervals of its own comparisons and of no others (Grubbs' test)."
    return [f"**Outlier**: {'; '.join(texts)}. {widens}"] if texts else []
