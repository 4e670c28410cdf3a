"""What the study says about learning rates: its experiment ``tuning``, which fixed those of the default grid.

It counts for an arm only if it trained a model of that size on the same text for as long, with the arm as it is here
but for the learning rate, on seeds that this grid does not have. Its best rate is the one of the lowest mean loss over
all formats and seeds that it tried; a rate at which a run diverged is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from altgrad.common.errors import UserError
from altgrad.config.arms import Arm
from altgrad.reporting.load import Study
from altgrad.reporting.study.questions import Question
from altgrad.reporting.study.runs import RunTable

EXPERIMENT = "tuning"
QUESTION = "default-rates.yaml"  # which has it
EQUAL = {"parameters": "model", "steps": "number of steps", "tokens": "number of tokens"}


@dataclass(frozen=True)
class Tuned:
    """The learning rates tried for an arm, in order, and the best; why the trial does not count here, if so."""

    rates: tuple[float, ...]
    best: float
    against: str | None

    @property
    def bracketed(self) -> bool:
        """Whether a smaller and a larger rate were tried."""
        return self.rates[0] < self.best < self.rates[-1]


@dataclass(frozen=True)
class Tuning:
    """A tuning run: its seeds and entries, and of each arm what it found."""

    seeds: tuple[int, ...]
    entries: tuple[str, ...]
    arms: dict[str, Tuned]


def load_tuning(folder: Path, study: Study) -> Tuning | None:
    """Return what the question and the runs in ``folder`` say of ``study``; ``None`` without them.

    A question that today's settings cannot be read from says nothing.
    """
    if not (folder / QUESTION).is_file():
        return None
    try:
        question = Question.read(folder / QUESTION)
        rows = RunTable.read(folder / "results").of_experiment(EXPERIMENT)
        params = question.params(EXPERIMENT, folder.parents[1] / "params.yaml")
    except UserError:
        return None
    elsewhere = _elsewhere(params, rows, study)
    arms = {
        arm: _tuned(params["optimizers"][arm]["lr"], found, elsewhere or _changed(arm, params, study))
        for arm, found in rows.groupby("optimizer")
        if arm in study.optimizers
    }
    return Tuning(tuple(sorted(set(rows["seed"]))), tuple(dict.fromkeys(rows["format"])), arms)


def _tuned(lr: float, found: pd.DataFrame, against: str | None) -> Tuned:
    losses = found.groupby("lr_scale")["val_loss"].agg(lambda values: values.mean(skipna=False)).sort_index()
    rates = [lr * float(scale) for scale in losses.index]
    best = rates[int(losses.reset_index(drop=True).idxmin())] if losses.notna().any() else float("nan")
    return Tuned(tuple(rates), best, against)


def _elsewhere(params: dict[str, Any], rows: pd.DataFrame, study: Study) -> str | None:
    """Return what of the experiment was not as it is in this grid, if anything."""
    if "task" in study.params:
        return "for another task"
    for column, what in EQUAL.items():
        if set(rows[column]) != set(study.cells[column].dropna()):
            return f"with another {what}"
    here = study.corpus.get("corpus"), study.corpus.get("vocab_size")
    if (params["corpus"], params["tokenizer"]["vocab_size"]) != here:
        return "with another text"
    return "on seeds of this grid" if set(rows["seed"]) & set(study.seeds) else None


def _changed(arm: str, params: dict[str, Any], study: Study) -> str | None:
    tried = Arm.model_validate(params["optimizers"][arm]).model_dump(mode="json")
    here = study.params["optimizers"][arm]
    changed = [name for name in tried if name != "lr" and tried[name] != here.get(name)]
    return f"with another {changed[0]}" if changed else None
