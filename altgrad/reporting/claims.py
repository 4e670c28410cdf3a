"""Every question that a report asks of the losses, declared before any is answered, and its result.

*Primary* questions, which share the 5 % that all of a report's results together may err by:

- the cost of each quantized entry against the baseline, under the baseline optimizer;
- what each optimizer that is neither baseline nor control changes against the baseline optimizer of its base and weight
  storage, in each entry where it sees a format's spacing.

*Controls* of that, asked once it is answered (see :mod:`altgrad.reporting.multiplicity`): the optimizer against each
shuffled or mean control that differs from it in the stiffness alone; against the same with a foreign format's spacing;
its RMS-matched form against the baseline optimizer; and the format-specific effect, what it changes in the format
beyond what it changes in the unquantized control.

Everything else is *exploratory*: what controls change by themselves, each adjusted by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from altgrad.reporting import roles
from altgrad.reporting.load import Study, every_rule
from altgrad.reporting.moderation import Spread, fitted
from altgrad.reporting.multiplicity import adjusted, holm
from altgrad.reporting.results import IDENTICAL, SEEDS, SMALLEST_EFFECT, TUNED_HERE, Result, amount
from altgrad.reporting.runs import Contrast, Run, Runs
from altgrad.reporting.statistics import Difference

COST, GAIN, BEYOND = "cost", "gain", "beyond"
NULL, FOREIGN, MATCHED = "null", "foreign", "matched"
Question = tuple[str, ...]  # (COST, entry), (GAIN, entry, arm), (BEYOND, entry, arm), (NULL, entry, arm, other), ...


@dataclass(frozen=True)
class Questions:
    """What is asked: ``contrasts`` by question, ``controls`` by the gain that they belong to, what is exploratory."""

    contrasts: dict[Question, Contrast]
    controls: dict[Question, list[Question]]
    exploratory: set[Question]


def ask(study: Study, best: Mapping[tuple[str, str], Run], references: Mapping[str, str]) -> Questions:
    """Return the questions of ``study``; ``best`` has the run that stands for each entry and arm."""
    contrasts: dict[Question, Contrast] = {}
    controls: dict[Question, list[Question]] = {}
    exploratory: set[Question] = set()
    plain, twins = roles.main_plain(study), roles.unquantized_controls(study)
    for entry in study.formats:
        if plain and study.baseline and entry != study.baseline and roles.is_quantized(study, entry):
            contrasts[COST, entry] = {best[entry, plain]: 1, best[study.baseline, plain]: -1}
    for arm, reference in references.items():
        settings = study.arm(arm)
        nulls = [] if roles.is_null(settings) else roles.relatives(study, arm, stiffness=roles.NULL_STIFFNESS)
        matched = [] if settings.get("match_rms") else roles.relatives(study, arm, match_rms=(True,))
        foreign = roles.relatives(study, arm, stiffness=roles.FOREIGN_STIFFNESS)
        foreign = [] if settings.get("stiffness") in (*roles.NULL_STIFFNESS, *roles.FOREIGN_STIFFNESS) else foreign
        rescales_another = settings.get("match_rms") and roles.relatives(study, arm, match_rms=(False, None))
        for entry in study.formats:
            own, base = best[entry, arm], best[entry, reference]
            gain: Question = (GAIN, entry, arm)
            contrasts[gain] = {own: 1, base: -1}
            if roles.is_control(settings) or rescales_another or not every_rule(study.entry(entry)):
                exploratory.add(gain)
                continue
            asked: dict[Question, Contrast] = {
                (NULL, entry, arm, other): {own: 1, best[entry, other]: -1} for other in nulls
            }
            asked |= {(FOREIGN, entry, arm, other): {own: 1, best[entry, other]: -1} for other in foreign}
            asked |= {(MATCHED, entry, arm, other): {best[entry, other]: 1, base: -1} for other in matched[:1]}
            if entry in twins:
                there = {best[twins[entry], arm]: -1, best[twins[entry], reference]: 1}
                asked[BEYOND, entry, arm] = {**contrasts[gain], **there}
            contrasts |= asked
            controls[gain] = list(asked)
    return Questions(contrasts, controls, exploratory)


@dataclass(frozen=True)
class Answers:
    """The result of every question, and the spreads they were found with: of costs, gains, differences of gains."""

    claims: dict[Question, Result]
    spreads: dict[str, Spread | None]

    def of(self, *question: str) -> Result | None:
        """Return the result of a question, ``None`` if it was not asked or no seed has all of its runs."""
        return self.claims.get(question)

    @property
    def paired_seeds(self) -> tuple[int, int] | None:
        """The fewest and the most seeds that a comparison is over; ``None`` where nothing is compared."""
        counts = [claim.difference.n for claim in self.claims.values()]
        return (min(counts), max(counts)) if counts else None


def answer(
    questions: Questions, runs: Runs, least: Mapping[str, float], *, tuned_here: bool,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Answers:  # fmt: skip
    """Answer every question.

    Args:
        questions: from `ask`.
        runs: the losses.
        least: by arm, the difference that its tuning makes where there is nothing to gain.
        tuned_here: whether the learning rates were chosen on the seeds that are compared. Then nothing is tested.
        smallest_effect: of interest, in the unit of the losses.
    """
    found = {
        question: difference
        for question, contrast in questions.contrasts.items()
        if (difference := runs.difference(contrast)) is not None
    }
    spreads = {}
    for kind in (COST, GAIN, BEYOND):
        alike = {q: contrast for q, contrast in questions.contrasts.items() if q in found and _kind(q) == kind}
        asked = {q: contrast for q, contrast in alike.items() if q not in questions.exploratory}
        spreads[kind] = _spread(runs, asked, found) or _spread(runs, alike, found)

    def spread_of(question: Question) -> Spread | None:
        spread = spreads[_kind(question)]
        return spread and replace(spread, least=least.get(question[2], 0.0) if question[0] == GAIN else 0.0)

    p_values, repeats = {}, {}
    seen: dict[bytes, Question] = {}
    for question, difference in found.items():
        first = seen.setdefault(runs.row(questions.contrasts[question]).tobytes(), question)
        spread = spread_of(question)
        if difference.is_zero or difference.n < 2 or spread is None:
            continue
        if first != question and first[0] == question[0] and first in p_values:
            repeats[question] = first  # E0M7 repeats E1M6: one question, asked once
        else:
            p_values[question] = spread.p_value(difference)
    controls = {gain: [c for c in own if c in p_values] for gain, own in questions.controls.items() if gain in p_values}
    asked_of = {control for own in controls.values() for control in own}
    primary = {q for q in p_values if q[0] in (COST, GAIN) and q not in questions.exploratory}
    levels = adjusted({q: p for q, p in p_values.items() if q in primary | asked_of}, controls)
    for arm in {q[2] for q in questions.exploratory}:
        levels |= holm({q: p for q, p in p_values.items() if q in questions.exploratory and q[2] == arm})
    claims = {}
    for question, difference in found.items():
        first, spread = repeats.get(question, question), spread_of(question)
        error = spread.error(difference) if spread else (math.nan, math.nan)
        p, level = p_values.get(first, math.nan), levels.get(first, math.nan)
        result = amount(difference, *error, p, level, SEEDS, smallest_effect)
        if tuned_here and result.outcome != IDENTICAL:
            result = replace(result, outcome=TUNED_HERE)
        claims[question] = replace(result, exploratory=question in questions.exploratory)
    return Answers(claims, spreads)


def _kind(question: Question) -> str:
    """Return which spread a question is read by: BEYOND holds four runs, everything else two."""
    return question[0] if question[0] in (COST, BEYOND) else GAIN


def _spread(runs: Runs, contrasts: Mapping[Question, Contrast], found: Mapping[Question, Difference]) -> Spread | None:
    """Return the spread of ``contrasts``, each counted once."""
    rows = {runs.row(contrast).tobytes(): question for question, contrast in contrasts.items()}
    kept = list(rows.values())
    if not kept:
        return None
    return fitted([found[q] for q in kept], np.array([runs.row(contrasts[q]) for q in kept]))
