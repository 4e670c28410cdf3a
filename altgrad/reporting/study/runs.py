"""The study's table of runs, and contrasts of them as people write them: sums of losses with signs.

A contrast is written as optimizers, then formats, each a sum of names with signs and, rarely, weights:

    spacing_scaled - adamw in E3M4
    rung - adamw_sr_weights in E3M4 - virtual.E3M4
    spacing_scaled - adamw in E3M4 of EXPERIMENT - ANOTHER
    adamw - spacing_scaled in E3M4 at MEASURE - ANOTHER

The parts multiply: the second is (rung - adamw_sr_weights in E3M4) - (rung - adamw_sr_weights in virtual.E3M4).
``of`` names experiments other than the hypothesis' own. ``at`` names a measure other than the loss of the trained
weights: a loss after pruning, or a classifier's metric.
"""

import itertools
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import pandas as pd

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import write_text
from altgrad.config.tasks import Found
from altgrad.reporting.statistics import PairedLosses

TRAINED = "trained"
#: The metrics of a classifier on test documents, besides its loss.
MEASURED: list[Found] = ["micro_f1", "macro_f1", "f1_rare", "f1_common"]
COLUMNS = [
    "experiment", "format", "optimizer", "seed", "lr_scale", "val_loss", "status", "steps", "tokens", "parameters",
    "machine", "torch", "commit", "purpose",
]  # fmt: skip
AFTER = ["experiment", "format", "optimizer", "seed", "lr_scale", "measure", "value"]
KEY = COLUMNS[:5]
FILES = (("runs.csv", COLUMNS, KEY), ("after_training.csv", AFTER, AFTER[:-1]))  # name, columns, what names a row
TYPES = {
    "seed": int, "lr_scale": float, "val_loss": float, "value": float, "steps": "Int64", "tokens": "Int64",
    "parameters": "Int64", "torch": str, "commit": str,
}  # fmt: skip
SUM = re.compile(r"\s+([+-])\s+")
TERM = re.compile(r"(?:(?P<weight>\d+(?:\.\d+)?)\*)?(?P<name>\w[\w.-]*)")
CONTRAST = re.compile(r"(?P<optimizers>.+?) in (?P<formats>.+?)(?: of (?P<experiments>.+?))?(?: at (?P<measures>.+))?")


class StudyRun(NamedTuple):
    """A run of an experiment over all seeds, with the ``measure`` of it, by default the loss of the trained weights."""

    experiment: str
    format: str
    optimizer: str
    lr_scale: float = 1.0
    measure: str = TRAINED


class Untrained(UserError):
    """A contrast names runs that the table lacks."""


@dataclass(frozen=True)
class RunTable:
    """All runs of the study.

    ``table`` has a row per run (`COLUMNS`) with its final validation loss, in nats per token or label, NaN for a run
    that did not end. ``after`` has a row per number that was measured after training (`AFTER`): a loss, or a metric of
    test documents (`MEASURED`).
    """

    table: pd.DataFrame
    after: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``runs.csv`` and ``after_training.csv``. Raises :class:`UserError` for other columns or a run twice."""
        tables = []
        for name, columns, key in FILES:
            path = folder / name
            table = pd.read_csv(path, dtype=TYPES) if path.exists() else None
            if table is None or list(table.columns) != columns:
                raise UserError(f"{path}: not a table with the columns {', '.join(columns)}; git checkout {path}")
            twice = table[table.duplicated(key)]
            if len(twice):
                run = " ".join(str(twice.iloc[0][name]) for name in key)
                raise UserError(f"{path}: {run} stands there twice; remove one of the two rows")
            tables.append(table)
        return cls(*tables)

    def write(self, folder: Path) -> None:
        """Write both files with their rows sorted, so that a new run changes no other line."""
        for (name, _, key), table in zip(FILES, (self.table, self.after), strict=True):
            ordered = table.sort_values(key).assign(lr_scale=lambda rows: rows["lr_scale"].map("{:g}".format))
            write_text(folder / name, ordered.to_csv(index=False, lineterminator="\n"))

    def of_experiment(self, *names: str) -> pd.DataFrame:
        """Return the rows of ``table`` of the experiments ``names``."""
        return self.table[self.table["experiment"].isin(names)]

    @cached_property
    def losses(self) -> PairedLosses[StudyRun]:
        """The measured value of every run, by seed: of the weights as trained, and after training."""
        both = pd.concat([self.table.assign(measure=TRAINED), self.after.rename(columns={"value": "val_loss"})])
        runs = map(StudyRun._make, both[list(StudyRun._fields)].itertuples(index=False, name=None))
        return PairedLosses.of(zip(runs, both["seed"], both["val_loss"], strict=True), sorted(set(both["seed"])))

    @cached_property
    def _rates(self) -> dict[StudyRun, list[StudyRun]]:
        """By the run at rate 1, the runs at each learning rate that are otherwise the same."""
        rates: dict[StudyRun, list[StudyRun]] = defaultdict(list)
        for run in self.losses.place:
            rates[run._replace(lr_scale=1.0)].append(run)
        return rates

    @cached_property
    def commits(self) -> dict[tuple[str, str, str], set[str]]:
        """The commits that a run was trained from, by experiment, format and optimizer."""
        return self.table.groupby(KEY[:3])["commit"].agg(set).to_dict()

    def run(
        self, experiment: str, fmt: str, optimizer: str, measure: str = TRAINED, *, best_rate: bool = False
    ) -> StudyRun | None:
        """Return a run at its one learning rate, or at the best one; ``None`` if the table lacks it.

        Raises :class:`UserError` where there are several rates and the best one is not asked for.
        """
        rates = self._rates.get(StudyRun(experiment, fmt, optimizer, measure=measure), [])
        if len(rates) > 1 and not best_rate:
            raise UserError(f"{experiment}: {optimizer} has {len(rates)} learning rates in {fmt}; say `rate: best`")
        return self.losses.best(rates) if rates else None


def parsed(
    texts: list[str], experiments: list[str], runs: RunTable, *, best_rate: bool = False
) -> dict[StudyRun, float]:
    """Return the weight of each run in the sum of the contrasts ``texts``.

    Args:
        texts: the contrasts, written as the module's docstring says.
        experiments: the experiments in which runs are looked up; the first that has a run counts.
        runs: all runs.
        best_rate: take each run at its best learning rate.

    Raises:
        UserError: where a text is no contrast. `Untrained` where no experiment has a run.
    """
    weights: dict[StudyRun, float] = defaultdict(float)
    for text in texts:
        match = CONTRAST.fullmatch(text.strip())
        if match is None:
            raise UserError(f"contrast {text!r}: write it as `optimizer - optimizer in format`")
        optimizers, formats, measures = (_sum(part, text) for part in (match[1], match[2], match[4] or TRAINED))
        places = _sum(match["experiments"], text) if match["experiments"] else {"": 1.0}
        for parts in itertools.product(*(part.items() for part in (optimizers, formats, places, measures))):
            optimizer, fmt, place, measure = (name for name, _ in parts)
            among = [place] if place else experiments
            candidates = (runs.run(name, fmt, optimizer, measure, best_rate=best_rate) for name in among)
            run = next(filter(None, candidates), None)
            if run is None:
                raise _absent(among, fmt, optimizer, measure, runs)
            weights[run] += math.prod(weight for _, weight in parts)
    return {run: weight for run, weight in weights.items() if weight}


def _absent(experiments: list[str], fmt: str, optimizer: str, measure: str, runs: RunTable) -> UserError:
    """Return the error for an absent run: an unknown format or optimizer, or else `Untrained`."""
    rows, places = runs.of_experiment(*experiments), ", ".join(experiments)
    for kind, name in (("format", fmt), ("optimizer", optimizer)):
        known = list(rows[kind].unique())
        if known and name not in known:
            return UserError(f"{places}: no run of {kind} {name!r}{did_you_mean(name, known)}")
    what = "" if measure == TRAINED else f" at {measure}"
    return Untrained(f"{places}: no run of {optimizer} in {fmt}{what}; `make study` trains it")


def _sum(text: str, whole: str) -> dict[str, float]:
    """Return the weight of each name in the sum ``text``; ``whole`` is the contrast, which an error quotes."""
    signs = ["+", *SUM.findall(text.strip())]
    weights: dict[str, float] = defaultdict(float)
    for sign, term in zip(signs, SUM.split(text.strip())[::2], strict=True):
        match = TERM.fullmatch(term)
        if match is None:
            raise UserError(f"contrast {whole!r}: {term!r} is no name, nor a weight times one, such as 0.5*adamw")
        weights[match["name"]] += float(match["weight"] or 1) * (1 if sign == "+" else -1)
    return weights
