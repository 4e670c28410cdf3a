"""Rows of runs from a CSV file, each checked: a mistake is one sentence with file and line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from altgrad.config import UserError, did_you_mean
from altgrad.recording import DIVERGED, KEY, STEP, whole


@dataclass(frozen=True)
class Row:
    """A loss of a run: the final one, or that after ``step``; NaN where the run has diverged."""

    configuration: str
    optimizer: str
    seed: int
    loss: float
    step: int | None = None

    @property
    def run(self) -> tuple[str, str, int]:
        """Which run it is of."""
        return self.configuration, self.optimizer, self.seed


def read_rows(path: Path, metric: str) -> list[Row]:
    """Return the final losses in ``path``, those in its column ``metric``, in the order of the file.

    Raises :class:`altgrad.config.UserError` for a file that is no such table, and for a run that stands there twice.
    """
    return [row for _, row in _rows(path, metric, KEY)]


def read_curves(path: Path, metric: str, runs: Sequence[Row]) -> list[Row]:
    """Return the losses by step in ``path``, a row per run and step; each run must be one of ``runs``."""
    known = {row.run for row in runs}
    found = []
    for line, row in _rows(path, metric, [*KEY, STEP]):
        if row.run not in known:
            raise UserError(f"{path}, line {line}: the results have no run of {_named(row)}")
        found.append(row)
    return found


def _rows(path: Path, metric: str, key: Sequence[str]) -> Iterator[tuple[int, Row]]:
    lines: dict[Row, int] = {}
    for line, values in _lines(path, [*key, metric]):
        row = _row(f"{path}, line {line}", values, metric)
        identity = Row(*row.run, 0.0, row.step)
        if identity in lines:
            raise UserError(f"{path}, line {line}: {_named(row)} stands in line {lines[identity]} too; remove one")
        lines[identity] = line
        yield line, row
    if not lines:
        raise UserError(f"{path}: no row below the names of the columns")


def _lines(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Return the line and the values of each row."""
    try:
        text = whole(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        columns = [name.strip() for name in next(reader, [])]
        if not columns:
            raise UserError(f"{path} is empty; expected the columns {', '.join(needed)} in its first line")
        for name in needed:
            if columns.count(name) != 1:
                wrong = "" if name in columns else did_you_mean(name, columns)
                raise UserError(f"{path}, line 1: {columns.count(name) or 'no'} column {name!r}{wrong}")
        for values in reader:
            if values and len(values) != len(columns):
                raise UserError(f"{path}, line {reader.line_num}: {len(values)} values for {len(columns)} columns")
            if values:
                yield reader.line_num, dict(zip(columns, (value.strip() for value in values), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}") from None


def _row(place: str, values: Mapping[str, str], metric: str) -> Row:
    for name in KEY[:2]:
        if not values[name]:
            raise UserError(f"{place}: {name} is empty")
    numbers = {name: _whole(place, name, values[name]) for name in (KEY[2], STEP) if name in values}
    return Row(values[KEY[0]], values[KEY[1]], numbers[KEY[2]], _loss(place, metric, values[metric]), numbers.get(STEP))


def _whole(place: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{place}: {name} is {text!r}; expected a whole number") from None


def _loss(place: str, metric: str, text: str) -> float:
    if text == DIVERGED:
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{place}: {metric} is {text!r}; expected a finite number, or {DIVERGED!r} if the run diverged")
    return value


def _named(row: Row) -> str:
    at = "" if row.step is None else f" at step {row.step}"
    return f"{row.configuration!r} under {row.optimizer!r} with seed {row.seed}{at}"
