"""The hypotheses of the study, judged: a row per comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from altgrad.common.errors import UserError
from altgrad.reporting.decision_rule import NO_EFFECT, NONE_SEEN, SEEDS, UNTESTED, Result, judged
from altgrad.reporting.study.questions import Hypothesis, Question
from altgrad.reporting.study.runs import MEASURED, Run, Runs, parsed

NATS = "nats"
Kind = Literal["registered", "exploratory", "not checked"]


@dataclass(frozen=True)
class Comparison:
    """A comparison of a hypothesis: ``label`` names it in its family, ``written`` are the contrasts it adds up."""

    label: str
    written: list[str]
    runs: dict[Run, float]
    result: Result | None  # none where no seed has all of its runs
    expected: str | None

    @property
    def unit(self) -> str:
        """The unit of its difference: that of a loss, of a classifier's F1, or none where it weighs the two."""
        measured = {run.measure in MEASURED for run in self.runs}
        return "ratio" if len(measured) > 1 else "F1" if True in measured else NATS

    @property
    def as_expected(self) -> bool | None:
        """Whether it came as was expected; ``None`` where nothing was, or nothing came."""
        if self.expected is None or self.result is None or self.result.outcome in UNTESTED:
            return None
        if self.expected == "not significant":
            return not self.result.significant
        return self.result.outcome in (NONE_SEEN if self.expected == NO_EFFECT else (self.expected,))


@dataclass(frozen=True)
class Registration:
    """Whether a hypothesis was registered before its runs, the commit that first had it, if any, and why it says so."""

    kind: Kind = "exploratory"
    commit: str = ""
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """A hypothesis with the comparisons of its family, in order; none where no contrast says it."""

    question: Question
    name: str
    hypothesis: Hypothesis
    comparisons: list[Comparison]
    registration: Registration = Registration()

    @property
    def as_expected(self) -> bool | None:
        """Whether all comparisons came as expected; ``None`` where nothing was expected beforehand."""
        if self.registration.kind == "exploratory":
            return None
        known = [found.as_expected for found in self.comparisons if found.as_expected is not None]
        return all(known) if known else None

    @property
    def first(self) -> tuple[Comparison, Result] | None:
        """The comparison of the smallest p-value, and its result."""
        tested = [(found, found.result) for found in self.comparisons if found.result is not None]
        return min(tested, key=lambda pair: (pair[1].adjusted, -abs(pair[1].difference.mean)), default=None)


def answered(question: Question, runs: Runs) -> list[Answer]:
    """Return the answer to each hypothesis of a question. Raises :class:`UserError` by the hypothesis' place, and
    `Untrained` where runs are missing.
    """
    asked: dict[tuple[str, str], dict[Run, float]] = {}
    families: dict[str, list[str]] = {}
    for name, hypothesis in question.hypotheses.items():
        families.setdefault(hypothesis.family or name, []).append(name)
        try:
            for label, texts in hypothesis.comparisons.items():
                asked[name, label] = parsed(texts, hypothesis.of or list(question.runs), runs)
        except (UserError, KeyError) as error:
            wrong = f"no value for {error} in `over`" if isinstance(error, KeyError) else str(error)
            kind = type(error) if isinstance(error, UserError) else UserError
            raise kind(f"{question.path}: hypotheses.{name}: {wrong}") from None
    results: dict[tuple[str, str], Result] = {}
    for members in families.values():
        first = question.hypotheses[members[0]]
        contrasts = {of: contrast for of, contrast in asked.items() if of[0] in members}
        differences = {
            of: difference for of, contrast in contrasts.items()
            if (difference := runs.difference(contrast, best_rate=first.rate == "best")) is not None
        }  # fmt: skip
        by_itself = (first.rule or question.rule) == "student"
        results |= judged(differences, 2 if by_itself else SEEDS)
    answers = []
    for name, hypothesis in question.hypotheses.items():
        found = [
            Comparison(label, written, asked[name, label], results.get((name, label)), hypothesis.expectation(label))
            for label, written in hypothesis.comparisons.items()
        ]
        answers.append(Answer(question, name, hypothesis, found))
    return answers
