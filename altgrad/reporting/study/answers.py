"""The hypotheses of the study, judged: a row per comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from altgrad.config import UserError
from altgrad.reporting.results import TOO_FEW, Result, judged
from altgrad.reporting.study.questions import Hypothesis, Question, comparisons, expected_of, experiments
from altgrad.reporting.study.runs import MEASURED, Run, Runs, parsed


@dataclass(frozen=True)
class Comparison:
    """A comparison of a hypothesis: ``label`` names it in its family, ``written`` are the contrasts it adds up."""

    label: str
    written: list[str]
    runs: dict[Run, float]
    result: Result | None  # none where no seed has all of its runs
    expected: str | None

    @property
    def of_f1(self) -> bool:
        """Whether a classifier's F1 has a part in it, so that it is no difference of losses."""
        return any(run.measure in MEASURED for run in self.runs)

    @property
    def as_expected(self) -> bool | None:
        """Whether it came as was expected; ``None`` where nothing was, or nothing came."""
        if self.expected is None or self.result is None or self.result.outcome == TOO_FEW:
            return None
        if self.expected == "not significant":
            return not self.result.significant
        return self.result.outcome == self.expected


@dataclass(frozen=True)
class Answer:
    """A hypothesis with the comparisons of its family, in order; none where no contrast says it."""

    question: Question
    name: str
    hypothesis: Hypothesis
    comparisons: list[Comparison]

    @property
    def as_expected(self) -> bool | None:
        """Whether all comparisons came as expected; ``None`` where nothing was expected of any."""
        known = [found.as_expected for found in self.comparisons if found.as_expected is not None]
        return all(known) if known else None

    @property
    def first(self) -> Comparison | None:
        """The comparison of the smallest p-value."""
        tested = [found for found in self.comparisons if found.result is not None]
        return min(tested, key=_order, default=None)

    def count(self, *outcomes: str) -> int:
        """How many of the comparisons have one of these outcomes."""
        return sum(found.result is not None and found.result.outcome in outcomes for found in self.comparisons)


def _order(found: Comparison) -> tuple[float, float]:
    assert found.result is not None
    return found.result.adjusted, -abs(found.result.difference.mean)


def answered(question: Question, runs: Runs) -> list[Answer]:
    """Return the answer to each hypothesis of a question. Raises :class:`UserError` by the hypothesis' place, and
    `Untrained` where runs are missing.
    """
    hypotheses = question.content.hypotheses
    asked: dict[str, dict[str, dict[Run, float]]] = {}
    for name, hypothesis in hypotheses.items():
        try:
            of = experiments(hypothesis) or list(question.content.runs)
            asked[name] = {label: _added(texts, of, runs) for label, texts in comparisons(hypothesis).items()}
        except (UserError, KeyError) as error:
            wrong = f"no value for {error} in `over`" if isinstance(error, KeyError) else str(error)
            kind = type(error) if isinstance(error, UserError) else UserError
            raise kind(f"{question.path}: hypotheses.{name}: {wrong}") from None
    families = [hypothesis.family or name for name, hypothesis in hypotheses.items()]
    results: dict[tuple[str, str], Result] = {}
    for family in dict.fromkeys(families):
        members = [name for name, of in zip(hypotheses, families, strict=True) if of == family]
        first = hypotheses[members[0]]
        contrasts = {(name, label): contrast for name in members for label, contrast in asked[name].items()}
        differences = {
            label: difference for label, contrast in contrasts.items()
            if (difference := runs.difference(contrast, best_rate=first.rate == "best")) is not None
        }  # fmt: skip
        by_itself = (first.rule or question.content.rule) == "student"
        results |= judged(differences, None if by_itself else _rows(contrasts))
    return [
        Answer(question, name, hypothesis, [
            Comparison(
                label, written, asked[name][label], results.get((name, label)), expected_of(hypothesis, label)
            ) for label, written in comparisons(hypothesis).items()
        ]) for name, hypothesis in hypotheses.items()
    ]  # fmt: skip


def _added(written: list[str], of: list[str], runs: Runs) -> dict[Run, float]:
    """Return the sum of contrasts."""
    found: dict[Run, float] = {}
    for text in written:
        for run, weight in parsed(text, of, runs).items():
            found[run] = found.get(run, 0.0) + weight
    return found


def _rows(contrasts: dict[tuple[str, str], dict[Run, float]]) -> dict[tuple[str, str], np.ndarray]:
    """Return the contrasts as rows over all runs that any of them has."""
    places = list(dict.fromkeys(run for contrast in contrasts.values() for run in contrast))
    return {
        label: np.array([contrast.get(run, 0.0) for run in places]) for label, contrast in contrasts.items()
    }  # fmt: skip
