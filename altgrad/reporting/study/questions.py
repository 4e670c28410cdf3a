"""The study's questions, as people write them in reports/study/<question>.yaml, and the results of their hypotheses."""

import itertools
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from altgrad.common.errors import UserError, did_you_mean, sentences
from altgrad.common.files import read_yaml
from altgrad.config.base import Settings
from altgrad.config.params import merged, with_presets
from altgrad.reporting.statistics import NO_EFFECT, NONE_SEEN, SEEDS, UNTESTED, Result, judged
from altgrad.reporting.study.runs import MEASURED, RunTable, StudyRun, parsed

LIKE = "like"  # the key for the experiment of the same question whose settings an experiment starts from
#: What an experiment has besides settings: commands that are run before it, what is measured after training, and
#: whether the weights of its one run are kept for others, which `start: data/weights/<experiment>`.
BESIDES = {LIKE, "before", "after", "keep"}
NATS = "nats"



def _in_order(text: str) -> str:
    low, high = map(float, text.split(" to "))
    if low >= high:
        raise ValueError(f"{text}: the lower end comes first")
    return text


#: The interval in which a mean difference was predicted, such as "0.010 to 0.024".
Interval = Annotated[str, Field(pattern=r"^-?[0-9]+[.][0-9]+ to -?[0-9]+[.][0-9]+$"), AfterValidator(_in_order)]
Expected = Literal["lower", "higher", "not significant", "no effect"] | Interval
Rule = Literal["bench", "student"]  # a test over at least five paired seeds, or over at least two
RULE: Rule = "bench"
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value or [])]


class Hypothesis(Settings):
    """A contrast, or a family of them, and the outcome that was expected before the runs."""

    says: str  # in words
    registered: date | None = None  # the day of the commit that states it; without one it is exploratory
    commit: str | None = None  # the registering commit, where it is older than the questions' files
    family: str | None = None  # hypotheses of one family are judged together
    #: As `altgrad.reporting.study.runs` reads it, with ``{names}`` of ``over`` in braces; several are added up.
    contrast: Texts = Field(default_factory=list)
    over: dict[str, list[str]] = Field(default_factory=dict)  # values by name; each combination is a comparison
    of: Texts = Field(default_factory=list)  # the experiments
    rate: Literal["one", "best"] = "one"  # at which learning rate each run is taken
    rule: Rule | None = None  # by default the question's rule
    expected: Expected | dict[str, Expected] | None = None  # the outcome: of all, or by the label of a comparison
    deviation: str | None = None  # how the runs differ from what was registered
    result: str | None = None  # in words, where no contrast can say it
    status: Literal["tested", "not run", "dropped"] = "tested"
    why: str | None = None  # the reason why it was not tested
    front: bool = False  # draw the comparisons, each the cost of a format, in README's figure

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.status != "tested" and not self.why:
            raise ValueError(f"status {self.status!r} needs `why`")
        if self.status == "tested" and (not self.contrast) == (self.result is None):
            raise ValueError("needs either `contrast` or, where no contrast can say it, `result`")
        return self

    @property
    def filled(self) -> dict[str, list[str]]:
        """The contrasts with the values of ``over`` filled in, by label: the values, such as "E4M3, adamw"."""
        return {} if not self.contrast else {
            ", ".join(values): [text.format(**dict(zip(self.over, values, strict=True))) for text in self.contrast]
            for values in itertools.product(*self.over.values())
        }

    @property
    def comparisons(self) -> dict[str, list[str]]:
        """`filled` if the hypothesis is tested, else empty: an untested one keeps its contrast for later."""
        return self.filled if self.status == "tested" else {}

    def expectation(self, label: str) -> Expected | None:
        """Return the expected outcome of the comparison ``label``; ``None`` if none was stated."""
        return self.expected.get(label) if isinstance(self.expected, dict) else self.expected


class Question(Settings):
    """A question, how its runs were trained, and its hypotheses."""

    question: str  # in words
    answer: str
    rule: Rule = RULE  # of the hypotheses that name none
    base: dict[str, Any] = Field(default_factory=dict)  # settings as in params.yaml
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)  # by experiment, what differs from ``base``
    hypotheses: dict[str, Hypothesis] = Field(default_factory=dict)  # by id
    #: The dtype of gradients by hypothesis; `altgrad.reporting.study.figures.draw_curve` draws these.
    curve: dict[str, Literal["float32", "bf16"]] = Field(default_factory=dict)
    #: Experiments of several models and lengths: the page has `reporting.cost_law_section`.
    law: list[str] = Field(default_factory=list)
    why: Texts = Field(default_factory=list)  # paragraphs below the answer
    path: Path  # of its file

    @property
    def name(self) -> str:
        """The name of the question's file without its ending."""
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a question. Raises :class:`UserError` that names every mistake and its place."""
        try:
            return cls.model_validate(read_yaml(path) | {"path": path})
        except ValidationError as error:
            raise UserError("\n".join(sentences(error, str(path)))) from None

    def settings(self, experiment: str) -> dict[str, Any]:
        """Return an experiment's changes to params.yaml. Raises :class:`UserError` for a wrong ``like``."""
        chain = [experiment]
        while (name := self.runs[chain[-1]].get(LIKE)) is not None:
            if name not in self.runs:
                near = did_you_mean(name, self.runs)
                raise UserError(f"{self.path}: runs.{chain[-1]}.{LIKE}: no experiment {name!r}{near}")
            if name in chain:
                raise UserError(f"{self.path}: runs.{name}.{LIKE}: leads back to itself")
            chain.append(name)
        settings: dict[str, Any] = {}
        for changes in (self.base, *(self.runs[name] for name in reversed(chain))):
            settings = merged(settings, {key: value for key, value in changes.items() if key not in BESIDES})
        return settings

    def params(self, experiment: str, params: Path) -> dict[str, Any]:
        """Return the whole content of a params.yaml for an experiment; ``params`` is the project's file."""
        return merged(with_presets(read_yaml(params)), self.settings(experiment))

    def besides(self, experiment: str) -> dict[str, Any]:
        """Return the entries of an experiment that are not settings, by name (see `BESIDES`)."""
        content = self.base | self.runs[experiment]
        return {key: content[key] for key in BESIDES & content.keys()}


def read_questions(folder: Path) -> list[Question]:
    """Return all questions in ``folder``, by name.

    Raises :class:`UserError` if a hypothesis or an experiment is defined twice, or an experiment is not defined.
    """
    questions = [Question.read(path) for path in sorted(folder.glob("*.yaml"))]
    for kind in ("hypotheses", "runs"):
        seen: dict[str, Path] = {}
        for question in questions:
            for name in getattr(question, kind):
                if name in seen:
                    raise UserError(f"{question.path}: {kind}.{name} stands in {seen[name]} too; give one another name")
                seen[name] = question.path
    for question in questions:
        for name, hypothesis in question.hypotheses.items():
            for experiment in hypothesis.of:
                if experiment not in seen:
                    near = did_you_mean(experiment, seen)
                    raise UserError(f"{question.path}: hypotheses.{name}.of: no experiment {experiment!r}{near}")
        for experiment in question.law:
            if experiment not in question.runs:
                near = did_you_mean(experiment, question.runs)
                raise UserError(f"{question.path}: law: no experiment {experiment!r}{near}")
    return questions


@dataclass(frozen=True)
class ContrastResult:
    """A comparison of a hypothesis; ``result`` is ``None`` where no seed has all of its runs."""

    label: str  # as in `Hypothesis.filled`
    written: list[str]  # the contrasts that it adds up
    runs: dict[StudyRun, float]  # with their weights
    result: Result | None
    expected: str | None

    @property
    def unit(self) -> str:
        """The unit of the difference: "nats" for losses, "F1" for a classifier's metrics, "ratio" if it has both."""
        of_metric = {run.measure in MEASURED for run in self.runs}
        return "ratio" if len(of_metric) > 1 else "F1" if True in of_metric else NATS

    @property
    def as_expected(self) -> bool | None:
        """Whether the result is the expected one; ``None`` without an expectation or a test.

        A predicted interval needs no test: the mean lies in it or not.
        """
        if self.expected is None or self.result is None:
            return None
        if len(ends := self.expected.split(" to ")) == 2:
            return float(ends[0]) <= self.result.difference.mean <= float(ends[1])
        if self.result.outcome in UNTESTED:
            return None
        if self.expected == "not significant":
            return not self.result.significant
        return self.result.outcome in (NONE_SEEN if self.expected == NO_EFFECT else (self.expected,))


Kind = Literal["registered", "exploratory", "not checked"]


@dataclass(frozen=True)
class Registration:
    """Whether a hypothesis was registered before its runs, the commit that first stated it, and the reason."""

    kind: Kind = "exploratory"
    commit: str = ""
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """A hypothesis with its comparisons, in order; no comparisons if it is answered in words."""

    question: Question
    name: str
    hypothesis: Hypothesis
    comparisons: list[ContrastResult]
    registration: Registration = Registration()

    @property
    def as_expected(self) -> bool | None:
        """Whether all tested comparisons are as expected; ``None`` if exploratory, or if none has an expectation."""
        if self.registration.kind == "exploratory":
            return None
        known = [one.as_expected for one in self.comparisons if one.as_expected is not None]
        return all(known) if known else None

    @property
    def first(self) -> tuple[ContrastResult, Result] | None:
        """The comparison with the smallest p-value, and its result; ``None`` if no comparison has a result."""
        tested = [(one, one.result) for one in self.comparisons if one.result is not None]
        return min(tested, key=lambda pair: (pair[1].adjusted, -abs(pair[1].difference.mean)), default=None)


def answered(question: Question, runs: RunTable) -> list[Answer]:
    """Return the answer to each hypothesis of a question.

    Raises :class:`UserError` with the hypothesis' place, and `Untrained` where runs are missing.
    """
    contrasts: dict[tuple[str, str], dict[StudyRun, float]] = {}
    families: dict[str, list[str]] = {}
    for name, asked in question.hypotheses.items():
        families.setdefault(asked.family or name, []).append(name)
        place = f"{question.path}: hypotheses.{name}"
        try:
            for label, texts in asked.comparisons.items():
                experiments = asked.of or list(question.runs)
                contrasts[name, label] = parsed(texts, experiments, runs, best_rate=asked.rate == "best")
        except KeyError as error:
            raise UserError(f"{place}: no value for {error} in `over`") from None
        except UserError as error:
            raise type(error)(f"{place}: {error}") from None
    results: dict[tuple[str, str], Result] = {}
    for members in families.values():
        rule = question.hypotheses[members[0]].rule or question.rule
        differences = {
            key: difference for key, contrast in contrasts.items()
            if key[0] in members and (difference := runs.losses.difference(contrast)) is not None
        }  # fmt: skip
        results |= judged(differences, 2 if rule == "student" else SEEDS)
    return [
        Answer(question, name, asked, [
            ContrastResult(label, texts, contrasts[name, label], results.get((name, label)), asked.expectation(label))
            for label, texts in asked.comparisons.items()
        ])
        for name, asked in question.hypotheses.items()
    ]  # fmt: skip
