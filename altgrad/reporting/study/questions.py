"""The questions of the study as people write them, reports/study/<question>.yaml, and the settings of their runs."""

from __future__ import annotations

import itertools
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from altgrad.common.errors import UserError, did_you_mean, sentences
from altgrad.common.files import read_yaml
from altgrad.config.base import Settings
from altgrad.config.params import merged, with_presets

LIKE = "like"  # the experiment of the same question that another one differs from
#: What an experiment has besides settings: commands that are run before it, what is measured after training, and
#: whether its one run's weights are kept for others, which `start: data/weights/<experiment>`.
BESIDES = {LIKE, "before", "after", "keep"}

Expected = Literal["lower", "higher", "not significant", "no effect"]
Rule = Literal["bench", "student"]
RULE: Rule = "bench"
Texts = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value or [])]


class Hypothesis(Settings):
    """A contrast, or a family of them, and what was expected of it before it was run.

    ``contrast`` is written as :mod:`altgrad.reporting.study.runs` has it, ``{names}`` of ``over`` in braces; several
    are added up. ``over`` makes a family, a comparison for each combination; hypotheses of one ``family`` are judged
    together. ``of`` names the experiments. ``rate: best`` takes each run at its best learning rate. ``expected`` may
    differ by the values of ``over``, joined by ", ". Without ``registered`` the comparisons are exploratory; with it,
    :mod:`altgrad.reporting.study.registered` looks for the registering commit, which ``commit`` names where it is older
    than the questions' files.
    ``front`` draws its comparisons, each the cost of a format, in README's figure.
    ``result`` is said in words where no contrast can say it, ``status`` where nothing was tested.
    """

    says: str
    registered: date | None = None
    commit: str | None = None
    family: str | None = None
    contrast: Texts = Field(default_factory=list)
    over: dict[str, list[str]] = Field(default_factory=dict)
    of: Texts = Field(default_factory=list)
    rate: Literal["one", "best"] = "one"
    rule: Rule | None = None
    expected: Expected | dict[str, Expected] | None = None
    deviation: str | None = None
    result: str | None = None
    status: Literal["tested", "not run", "dropped"] = "tested"
    why: str | None = None
    front: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Hypothesis:
        if self.status != "tested" and not self.why:
            raise ValueError(f"status {self.status!r} needs `why`")
        if self.status == "tested" and (not self.contrast) == (self.result is None):
            raise ValueError("needs either `contrast` or, where no contrast can say it, `result`")
        return self

    @property
    def comparisons(self) -> dict[str, list[str]]:
        """What is `filled` in; none of a hypothesis that was not tested, which keeps its contrast for when it is."""
        return self.filled if self.status == "tested" else {}

    @property
    def filled(self) -> dict[str, list[str]]:
        """By label, the values of ``over`` joined by ", ", the contrast's texts with the values filled in."""
        return {} if not self.contrast else {
            ", ".join(values): [text.format(**dict(zip(self.over, values, strict=True))) for text in self.contrast]
            for values in itertools.product(*self.over.values())
        }

    def expectation(self, label: str) -> Expected | None:
        """Return what was expected of a comparison."""
        return self.expected.get(label) if isinstance(self.expected, dict) else self.expected


class Question(Settings):
    """A question, how its runs were trained, and its hypotheses.

    ``base`` are settings as in params.yaml, ``runs`` by experiment what differs from them. ``rule`` is the test of
    all hypotheses that name none. ``curve`` has the hypotheses, each with the dtype of its gradients, whose comparisons
    :mod:`altgrad.reporting.study.curve` draws against the tokens of a batch. ``why`` are paragraphs below the answer.
    ``path`` is that of its file, by which it is called.
    """

    question: str
    answer: str
    rule: Rule = RULE
    base: dict[str, Any] = Field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    hypotheses: dict[str, Hypothesis] = Field(default_factory=dict)
    curve: dict[str, Literal["float32", "bf16"]] = Field(default_factory=dict)
    why: Texts = Field(default_factory=list)
    path: Path

    @property
    def name(self) -> str:
        """What it is called."""
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> Question:
        """Read and check a question; :class:`UserError` with every mistake, by its place."""
        try:
            return cls.model_validate(read_yaml(path) | {"path": path})
        except ValidationError as error:
            raise UserError("\n".join(sentences(error, str(path)))) from None


def read_questions(folder: Path) -> list[Question]:
    """Return all questions in ``folder`` by name.

    Raises :class:`UserError` for an id or an experiment that stands twice, and for an experiment that nobody has.
    """
    found = [Question.read(path) for path in sorted(folder.glob("*.yaml"))]
    for kind in ("hypotheses", "runs"):
        seen: dict[str, Path] = {}
        for question, name in ((asked, name) for asked in found for name in getattr(asked, kind)):
            if name in seen:
                raise UserError(f"{question.path}: {kind}.{name} stands in {seen[name]} too; give one another name")
            seen[name] = question.path
    for question in found:
        for name, hypothesis in question.hypotheses.items():
            for experiment in hypothesis.of:
                if experiment not in seen:
                    near = did_you_mean(experiment, seen)
                    raise UserError(f"{question.path}: hypotheses.{name}.of: no experiment {experiment!r}{near}")
    return found


def settings_of(question: Question, experiment: str) -> dict[str, Any]:
    """Return what an experiment changes in params.yaml. Raises :class:`UserError` for a ``like`` that leads nowhere."""
    runs, chain = question.runs, [experiment]
    while (name := runs[chain[-1]].get(LIKE)) is not None:
        if name not in runs:
            near = did_you_mean(name, runs)
            raise UserError(f"{question.path}: runs.{chain[-1]}.{LIKE}: no experiment {name!r}{near}")
        if name in chain:
            raise UserError(f"{question.path}: runs.{name}.{LIKE}: leads back to itself")
        chain.append(name)
    settings: dict[str, Any] = {}
    for own in (question.base, *(runs[name] for name in reversed(chain))):
        settings = merged(settings, {key: value for key, value in own.items() if key not in BESIDES})
    return settings


def of_experiment(question: Question, experiment: str) -> dict[str, Any]:
    """Return what an experiment has besides settings."""
    own = question.base | question.runs[experiment]
    return {key: own[key] for key in BESIDES & own.keys()}


def params_of(question: Question, experiment: str, params: Path) -> dict[str, Any]:
    """Return the whole content of a params.yaml for an experiment."""
    return merged(with_presets(read_yaml(params)), settings_of(question, experiment))
