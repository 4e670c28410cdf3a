"""Every question that a report asks of the losses, declared before any is answered, and its result.

*Primary* questions, which share the 5 % that all of a report's results together may err by:

- the cost of each quantized entry against the baseline, under the baseline optimizer;
- what each optimizer that is neither baseline nor control changes against the baseline optimizer of its base and weight
  storage, in each entry whose weights have a format.

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

from altgrad.reporting import roles
from altgrad.reporting.load import Study, every_rule
from altgrad.reporting.multiplicity import adjusted
from altgrad.reporting.results import IDENTICAL, SEEDS, SMALLEST_EFFECT, TUNED_HERE, Result, amount
from altgrad.reporting.runs import Contrast, Run, Runs

COST, GAIN, BEYOND, CONTROL, MATCHED = "cost", "gain", "beyond", "control", "matched"
Question = tuple[str, ...]  # (COST, entry), (GAIN or BEYOND, entry, arm), (CONTROL or MATCHED, entry, arm, other)


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
    plain = roles.main_plain(study)
    for entry in study.formats:
        if plain and study.baseline and entry != study.baseline and roles.is_quantized(study, entry):
            contrasts[COST, entry] = {best[entry, plain]: 1, best[study.baseline, plain]: -1}
    for arm, reference in references.items():
        settings = study.arm(arm)
        kinds = [roles.NULL_STIFFNESS, roles.FOREIGN_STIFFNESS]  # an arm of one of them has those before it as controls
        own_kind = [settings.get("stiffness") in kind for kind in kinds]
        kinds = kinds[: own_kind.index(True)] if True in own_kind else kinds
        others = [other for kind in kinds for other in roles.relatives(study, arm, stiffness=kind)]
        matched = [] if settings.get("match_rms") else roles.relatives(study, arm, match_rms=(True,))[:1]
        rescales_another = settings.get("match_rms") and roles.relatives(study, arm, match_rms=(False, None))
        for entry in study.formats:
            own, base = best[entry, arm], best[entry, reference]
            gain: Question = (GAIN, entry, arm)
            contrasts[gain] = {own: 1, base: -1}
            if roles.is_control(settings) or rescales_another or not every_rule(study.entry(entry)):
                exploratory.add(gain)
                continue
            asked: dict[Question, Contrast] = {
                **{(CONTROL, entry, arm, other): {own: 1, best[entry, other]: -1} for other in others},
                **{(MATCHED, entry, arm, other): {best[entry, other]: 1, base: -1} for other in matched},
            }
            if twin := roles.unquantized_control(study, entry, arm):
                there = {best[twin, arm]: -1, best[twin, reference]: 1}
                asked[BEYOND, entry, arm] = {**contrasts[gain], **there}
            contrasts |= asked
            controls[gain] = list(asked)
    return Questions(contrasts, controls, exploratory)


@dataclass(frozen=True)
class Answers:
    """The result of every question."""

    claims: dict[Question, Result]

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
    exploratory = questions.exploratory
    found = {q: known for q, rows in questions.contrasts.items() if (known := runs.difference(rows)) is not None}
    p_values: dict[Question, float] = {}
    seen: dict[tuple[str, bytes], Question] = {}
    asked_as: dict[Question, Question] = {}  # E0M7 repeats E1M6: one question, asked once
    for q, difference in found.items():
        if difference.sd > 0:
            asked_as[q] = seen.setdefault((q[0], runs.row(questions.contrasts[q]).tobytes()), q)
            p_values.setdefault(asked_as[q], difference.p_value(least.get(q[2], 0.0) if q[0] == GAIN else 0.0))
    controls = {gain: [q for q in own if q in p_values] for gain, own in questions.controls.items() if gain in p_values}
    primary = {q for q in p_values if q[0] in (COST, GAIN) and q not in exploratory}.union(*controls.values())
    levels = adjusted({q: p for q, p in p_values.items() if q in primary}, controls)
    for arm in {q[2] for q in exploratory}:
        levels |= adjusted({q: p for q, p in p_values.items() if q in exploratory and q[2] == arm})
    claims = {}
    for q, difference in found.items():
        result = amount(difference, levels.get(asked_as.get(q, q), math.nan), SEEDS, smallest_effect)
        if tuned_here and result.outcome != IDENTICAL:
            result = replace(result, outcome=TUNED_HERE)
        claims[q] = replace(result, exploratory=q in exploratory)
    return Answers(claims)
