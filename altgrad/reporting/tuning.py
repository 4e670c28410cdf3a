"""The learning rates that the study tried: its experiment ``tuning`` fixed those of the default grid.

The experiment counts for an optimizer if it trained a model of the same size on the same text for as many steps. All
settings apart from the learning rate must be the same, and the seeds must not be those of this grid. The best rate has
the lowest mean loss over all formats and seeds tried; a rate at which a run diverged is not the best.
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

EXPERIMENT, QUESTION = "tuning", "default-rates.yaml"  # the file of the experiment's question
EQUAL = {"parameters": "model", "steps": "number of steps", "tokens": "number of tokens"}


@dataclass(frozen=True)
class Tuned:
    """The learning rates tried for an optimizer, ascending, and the best; ``against``: why they do not count, if so."""

    rates: tuple[float, ...]
    best: float
    against: str | None

    @property
    def bracketed(self) -> bool:
        """Whether a smaller and a larger rate than the best were tried."""
        return self.rates[0] < self.best < self.rates[-1]


@dataclass(frozen=True)
class Tuning:
    """The seeds and entries of the experiment, and by optimizer what it found."""

    seeds: tuple[int, ...]
    entries: tuple[str, ...]
    arms: dict[str, Tuned]


def load_tuning(folder: Path, study: Study) -> Tuning | None:
    """Return the tuning in ``folder`` of the optimizers that ``study`` has; ``None`` if the folder cannot be read."""
    if not (folder / QUESTION).is_file():
        return None
    try:
        rows = RunTable.read(folder / "results").of_experiment(EXPERIMENT)
        params = Question.read(folder / QUESTION).params(EXPERIMENT, folder.parents[1] / "params.yaml")
    except UserError:
        return None
    elsewhere, arms = _elsewhere(params, rows, study), {}
    for arm, runs in rows.groupby("optimizer"):
        if arm in study.optimizers:
            losses = runs.groupby("lr_scale")["val_loss"].agg(lambda values: values.mean(skipna=False)).sort_index()
            rates = tuple(params["optimizers"][arm]["lr"] * float(scale) for scale in losses.index)
            best = rates[int(losses.argmin())] if losses.notna().any() else float("nan")
            arms[arm] = Tuned(rates, best, elsewhere or _changed(arm, params, study))
    return Tuning(tuple(sorted(set(rows["seed"]))), tuple(dict.fromkeys(rows["format"])), arms)


def _elsewhere(params: dict[str, Any], rows: pd.DataFrame, study: Study) -> str | None:
    """Return how the experiment differs from this grid, such as "with another text"; ``None`` if it does not."""
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
    tried, here = Arm.model_validate(params["optimizers"][arm]).model_dump(mode="json"), study.params["optimizers"][arm]
    changed = [name for name in tried if name != "lr" and tried[name] != here.get(name)]
    return f"with another {changed[0]}" if changed else None
