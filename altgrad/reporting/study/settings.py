"""The settings of an experiment: params.yaml with the question's ``base`` and what the experiment changes in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altgrad.config import UserError, did_you_mean
from altgrad.config.files import read_yaml
from altgrad.config.resolve import merged
from altgrad.reporting.study.questions import Question

LIKE = "like"  # the experiment of the same question that another one differs from
#: What an experiment has besides settings: commands that are run before it, what is measured after training, and
#: whether its one run's weights are kept for others, which `start: data/weights/<experiment>`.
BESIDES = {LIKE, "before", "after", "keep"}


def settings_of(question: Question, experiment: str) -> dict[str, Any]:
    """Return what an experiment changes in params.yaml. Raises :class:`UserError` for a ``like`` that leads nowhere."""
    runs = question.content.runs
    chain: list[str] = []
    name: str | None = experiment
    while name is not None:
        if name not in runs:
            near = did_you_mean(name, runs)
            raise UserError(f"{question.path}: runs.{chain[-1]}.{LIKE}: no experiment {name!r}{near}")
        if name in chain:
            raise UserError(f"{question.path}: runs.{name}.{LIKE}: leads back to itself")
        chain.append(name)
        name = runs[name].get(LIKE)
    settings = {key: value for key, value in question.content.base.items() if key not in BESIDES}
    for name in reversed(chain):
        settings = merged(settings, {key: value for key, value in runs[name].items() if key not in BESIDES})
    return settings


def of_experiment(question: Question, experiment: str) -> dict[str, Any]:
    """Return what an experiment has besides settings."""
    own = question.content.base | question.content.runs[experiment]
    return {key: own[key] for key in BESIDES & own.keys()}


def params_of(question: Question, experiment: str, params: Path) -> dict[str, Any]:
    """Return the whole content of a params.yaml for an experiment."""
    return merged(read_yaml(params), settings_of(question, experiment))

