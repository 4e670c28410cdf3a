"""Every question that a report asks of the losses, declared before any is answered, and its result.

*Primary* questions share the 5 % by which all results of a report together may err:

- the cost of each quantized entry (format or recipe) against the baseline, under the baseline optimizer;
- the gain of each optimizer that is no control over its baseline optimizer, in each entry whose weights have a format.

*Controls* are asked once a gain is significant (see `altgrad.reporting.decision_rule.adjusted`): the optimizer against
each shuffled or mean control, and against one with a foreign format's spacing; its RMS-matched form against the
baseline optimizer; and the format-specific effect, which is the gain minus that in the unquantized control.

Everything else is *exploratory*, such as the gain of a control, and adjusted per optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.decision_rule import IDENTICAL, SEEDS, SMALLEST_EFFECT, TUNED_HERE, Result, adjusted, judge
from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.statistics import Contrast, PairedLosses, Run

COST, GAIN, BEYOND, CONTROL, MATCHED = "cost", "gain", "beyond", "control", "matched"
Question = tuple[str, ...]  # (COST, entry), (GAIN or BEYOND, entry, arm), (CONTROL or MATCHED, entry, arm, other)


@dataclass(frozen=True)
class Questions:
    """The questions of a report: the contrast of each, the controls of each gain, and which ones are exploratory."""

    contrasts: dict[Question, Contrast]
    controls: dict[Question, list[Question]]
    exploratory: set[Question]


def losses_of(study: Study, column: str) -> PairedLosses[Run]:
    """Return ``column`` of the study's cells by run and seed; NaN for a cell that did not complete."""
    cells = study.cells
    losses = cells[column].where(cells["status"] == COMPLETED).to_numpy(dtype="float64")
    runs = zip(cells["format"], cells["optimizer"], cells["lr_scale"], strict=True)
    return PairedLosses.of(zip(runs, cells["seed"], losses, strict=True), study.seeds)


def ask(study: Study, best: Mapping[tuple[str, str], Run], references: Mapping[str, str]) -> Questions:
    """Return the questions of ``study``.

    Args:
        study: the runs.
        best: the run at the chosen learning rate, by (entry, optimizer).
        references: the baseline optimizer of each optimizer that has one.
    """
    contrasts: dict[Question, Contrast] = {}
    controls: dict[Question, list[Question]] = {}
    exploratory: set[Question] = set()
    plain = roles.main_plain(study)
    for entry in study.formats:
        if plain and study.baseline and entry != study.baseline and roles.is_quantized(study, entry):
            contrasts[COST, entry] = {best[entry, plain]: 1, best[study.baseline, plain]: -1}
    for arm, reference in references.items():
        others, (matched, form_of) = roles.controls(study, arm), roles.rms_forms(study, arm)
        is_secondary = roles.is_control(study.arm(arm)) or form_of
        for entry in study.formats:
            method, base = best[entry, arm], best[entry, reference]
            gain: Question = (GAIN, entry, arm)
            contrasts[gain] = {method: 1, base: -1}
            if is_secondary or not roles.has_format(study, entry):
                exploratory.add(gain)
                continue
            asked: dict[Question, Contrast] = {
                **{(CONTROL, entry, arm, other): {method: 1, best[entry, other]: -1} for other in others},
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
        """The fewest and the most seeds of a comparison; ``None`` where nothing is compared."""
        counts = [claim.difference.n for claim in self.claims.values()]
        return (min(counts), max(counts)) if counts else None


def answer(
    questions: Questions, runs: PairedLosses[Run], least: Mapping[str, float], *, tuned_here: bool,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Answers:  # fmt: skip
    """Answer every question.

    Args:
        questions: from `ask`.
        runs: the losses.
        least: by optimizer, the difference that its tuning alone makes; a gain is tested against this difference.
        tuned_here: whether the learning rates were chosen on the seeds that are compared. Then nothing is tested.
        smallest_effect: the smallest effect of interest, in the unit of the losses.
    """
    exploratory = questions.exploratory
    differences = {
        q: difference for q, contrast in questions.contrasts.items()
        if (difference := runs.difference(contrast)) is not None
    }  # fmt: skip
    p_values: dict[Question, float] = {}
    seen: dict[tuple[str, bytes], Question] = {}
    asked_as: dict[Question, Question] = {}  # runs of E0M7 and E1M6 are identical: one question
    for q, difference in differences.items():
        if difference.sd > 0:
            asked_as[q] = seen.setdefault((q[0], runs.row(questions.contrasts[q]).tobytes()), q)
            p_values.setdefault(asked_as[q], difference.p_value(least.get(q[2], 0.0) if q[0] == GAIN else 0.0))
    controls = {gain: [q for q in own if q in p_values] for gain, own in questions.controls.items() if gain in p_values}
    primary = {q for q in p_values if q[0] in (COST, GAIN) and q not in exploratory}.union(*controls.values())
    levels = adjusted({q: p for q, p in p_values.items() if q in primary}, controls)
    for arm in {q[2] for q in exploratory}:
        levels |= adjusted({q: p for q, p in p_values.items() if q in exploratory and q[2] == arm})
    claims = {}
    for q, difference in differences.items():
        result = judge(difference, levels.get(asked_as.get(q, q), math.nan), SEEDS, smallest_effect)
        if tuned_here and result.outcome != IDENTICAL:
            result = replace(result, outcome=TUNED_HERE)
        claims[q] = replace(result, exploratory=q in exploratory)
    return Answers(claims)
