"""The table of runs, and contrasts of their losses: sums with signs, seed by seed.

A contrast is written as optimizers, then formats, each a sum of names with signs and, rarely, weights:

    spacing_scaled - adamw in E3M4
    rung - adamw_sr_weights in E3M4 - virtual.E3M4
    spacing_scaled - adamw in E3M4 of EXPERIMENT - ANOTHER
    adamw - spacing_scaled in E3M4 at MEASURE - ANOTHER

The parts multiply: the second is (rung - adamw_sr_weights in E3M4) - (rung - adamw_sr_weights in virtual.E3M4).
``of`` names experiments, where those of the hypothesis do not say which; ``at`` what the loss is of, where not of the
trained weights, or which metric of a classifier stands in its place.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import write_text
from altgrad.config.tasks import Found
from altgrad.reporting.statistics import Difference, summarised

TRAINED = "trained"
#: Of test documents, by a classifier; beside its loss.
MEASURED: list[Found] = ["micro_f1", "macro_f1", "f1_rare", "f1_common"]
COLUMNS = [
    "experiment", "format", "optimizer", "seed", "lr_scale", "val_loss", "status", "steps", "tokens", "parameters",
    "machine", "torch", "commit", "purpose",
]  # fmt: skip
AFTER = ["experiment", "format", "optimizer", "seed", "lr_scale", "measure", "value"]
KEY = COLUMNS[:5]
FILES = (("runs.csv", COLUMNS, KEY), ("after_training.csv", AFTER, AFTER[:-1]))  # columns, and those that tell rows
TYPES = {
    "seed": int, "lr_scale": float, "val_loss": float, "value": float, "steps": "Int64", "tokens": "Int64",
    "parameters": "Int64", "torch": str, "commit": str,
}  # fmt: skip
SUM = re.compile(r"\s+([+-])\s+")
TERM = re.compile(r"(?:(?P<weight>\d+(?:\.\d+)?)\*)?(?P<name>\w[\w.-]*)")
CONTRAST = re.compile(r"(?P<optimizers>.+?) in (?P<formats>.+?)(?: of (?P<experiments>.+?))?(?: at (?P<measures>.+))?")


@dataclass(frozen=True)
class Run:
    """What a loss is of, over all seeds; ``measure``: of the trained weights, or what was done to them afterwards."""

    experiment: str
    format: str
    optimizer: str
    measure: str = TRAINED


RUN = [field.name for field in fields(Run)]


class Untrained(UserError):
    """The table of runs lacks one that a hypothesis is about."""


@dataclass(frozen=True)
class Runs:
    """Every run of the study.

    ``table`` has a row per run (`COLUMNS`) with its final validation loss, in nats per token or label, NaN for a run
    that did not end; ``after`` one per number that was measured after training (`AFTER`): a loss, or what `MEASURED`
    has of test documents.
    """

    table: pd.DataFrame
    after: pd.DataFrame

    @classmethod
    def read(cls, folder: Path) -> Runs:
        """Read ``runs.csv`` and ``after_training.csv``; :class:`UserError` where a column is absent or a run twice."""
        found = []
        for name, columns, key in FILES:
            path = folder / name
            table = pd.read_csv(path, dtype=TYPES) if path.exists() else None
            if table is None or list(table.columns) != columns:
                raise UserError(f"{path}: not a table with the columns {', '.join(columns)}; git checkout {path}")
            twice = table[table.duplicated(key)]
            if len(twice):
                run = " ".join(str(twice.iloc[0][name]) for name in key)
                raise UserError(f"{path}: {run} stands there twice; remove one of the two rows")
            found.append(table)
        return cls(*found)

    def write(self, folder: Path) -> None:
        """Write both files in one order, so that a new run changes no line but its own."""
        for (name, _, key), table in zip(FILES, (self.table, self.after), strict=True):
            ordered = table.sort_values(key).assign(lr_scale=lambda rows: rows["lr_scale"].map("{:g}".format))
            write_text(folder / name, ordered.to_csv(index=False, lineterminator="\n"))

    @cached_property
    def _losses(self) -> dict[Run, list[pd.Series]]:
        """By run, the losses by seed at each of its rates."""
        both = pd.concat([self.table.assign(measure=TRAINED), self.after.rename(columns={"value": "val_loss"})])
        found: dict[Run, list[pd.Series]] = defaultdict(list)
        for (*run, _), rows in both.groupby([*RUN, "lr_scale"], sort=False):
            found[Run(*run)].append(rows.set_index("seed")["val_loss"])
        return dict(found)

    def has(self, run: Run) -> bool:
        """Whether the table has the run."""
        return run in self._losses

    def commits(self, run: Run) -> set[str]:
        """Return the commits that a run was trained from."""
        return self._commits[run.experiment, run.format, run.optimizer]

    @cached_property
    def _commits(self) -> dict[tuple[str, str, str], set[str]]:
        found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
        for experiment, fmt, optimizer, commit in self.table[[*RUN[:3], "commit"]].itertuples(index=False):
            found[experiment, fmt, optimizer].add(commit)
        return found

    def of_experiment(self, *names: str) -> pd.DataFrame:
        """Return the rows of experiments."""
        return self.table[self.table["experiment"].isin(names)]

    def losses(self, run: Run, *, best_rate: bool = False) -> pd.Series:
        """Return the losses of a run by seed: at its one rate, or ``best_rate``: at that of the lowest mean.

        A rate at which a seed has no loss is not the best. Raises :class:`UserError` for rates where one is asked for.
        """
        rates = self._losses[run]
        if len(rates) > 1 and not best_rate:
            raise UserError(
                f"{run.experiment}: {run.optimizer} has {len(rates)} learning rates in {run.format}; say `rate: best`"
            )
        return min(rates, key=lambda losses: (losses.isna().sum(), losses.mean()))

    def by_seed(self, contrast: Mapping[Run, float], *, best_rate: bool = False) -> pd.Series:
        """Return a contrast seed by seed; NaN where one of its runs has no loss."""
        parts = [weight * self.losses(run, best_rate=best_rate) for run, weight in contrast.items()]
        return pd.concat(parts, axis=1).sum(axis=1, skipna=False)

    def difference(self, contrast: Mapping[Run, float], *, best_rate: bool = False) -> Difference | None:
        """Return the mean of a contrast over the seeds that all of its runs have; ``None`` without one."""
        return summarised(np.asarray(self.by_seed(contrast, best_rate=best_rate)))


def parsed(texts: list[str], experiments: list[str], runs: Runs) -> dict[Run, float]:
    """Return the weight of each run in the sum of contrasts as they are written.

    Each run is that of the first of ``experiments`` which has it. Raises :class:`UserError` where a text is no contrast
    or no experiment has a run.
    """
    found: dict[Run, float] = defaultdict(float)
    for text in texts:
        match = CONTRAST.fullmatch(text.strip())
        if match is None:
            raise UserError(f"contrast {text!r}: write it as `optimizer - optimizer in format`")
        optimizers, formats, measures = (_sum(part, text) for part in (match[1], match[2], match[4] or TRAINED))
        places = _sum(match["experiments"], text) if match["experiments"] else {"": 1.0}
        for parts in itertools.product(*(part.items() for part in (optimizers, formats, places, measures))):
            optimizer, fmt, place, measure = (name for name, _ in parts)
            run = _run([place] if place else experiments, fmt, optimizer, measure, runs)
            found[run] += math.prod(weight for _, weight in parts)
    return {run: weight for run, weight in found.items() if weight}


def _run(experiments: list[str], fmt: str, optimizer: str, measure: str, runs: Runs) -> Run:
    for name in experiments:
        if runs.has(run := Run(name, fmt, optimizer, measure)):
            return run
    rows = runs.of_experiment(*experiments)
    for kind, name in (("format", fmt), ("optimizer", optimizer)):
        known = list(rows[kind].unique())
        if known and name not in known:
            raise UserError(f"{', '.join(experiments)}: no run of {kind} {name!r}{did_you_mean(name, known)}")
    what = "" if measure == TRAINED else f" at {measure}"
    raise Untrained(f"{', '.join(experiments)}: no run of {optimizer} in {fmt}{what}; `make study` trains it")


def _sum(text: str, whole: str) -> dict[str, float]:
    """Return the names of a sum with their weights."""
    signs = ["+", *SUM.findall(text.strip())]
    found: dict[str, float] = defaultdict(float)
    for sign, term in zip(signs, SUM.split(text.strip())[::2], strict=True):
        match = TERM.fullmatch(term)
        if match is None:
            raise UserError(f"contrast {whole!r}: {term!r} is no name, nor a weight times one, such as 0.5*adamw")
        found[match["name"]] += float(match["weight"] or 1) * (1 if sign == "+" else -1)
    return found
