"""Rows of runs from a CSV file, each checked: a mistake is one sentence with file and line."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from altgrad.config import UserError, did_you_mean
from altgrad.config.files import csv_rows
from altgrad.recording import DIVERGED, KEY, STEP, whole

ALL = "all"  # the configuration, or the optimizer, of a table that says none


def read_rows(path: Path, metric: str, key: Sequence[str] = KEY) -> pd.DataFrame:
    """Return the losses in ``path``, those in its column ``metric``, in the order of the file.

    Columns are those of ``key``, and ``loss``, float64, NaN where the run has diverged. Raises
    :class:`altgrad.config.UserError` for a file that is no such table, and for a run that stands there twice.
    """
    found: dict[tuple[str | int, ...], tuple[int, float]] = {}
    for line, values in _lines(path, [*key, metric]):
        place = f"{path}, line {line}"
        run = tuple(_told_by(place, name, values[name]) for name in key)
        if run in found:
            raise UserError(f"{place}: {_named(run)} stands in line {found[run][0]} too; remove one")
        found[run] = line, _loss(place, metric, values[metric])
    if not found:
        raise UserError(f"{path}: no row below the names of the columns")
    lines, losses = zip(*found.values(), strict=True)
    return pd.DataFrame(list(found), lines, key).assign(loss=losses)


def read_curves(path: Path, metric: str, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by ``step`` in ``path``, a row per run and step; each run must be one of ``runs``."""
    found = read_rows(path, metric, [*KEY, STEP])
    known = pd.MultiIndex.from_frame(found[KEY]).isin(pd.MultiIndex.from_frame(runs[KEY]))
    for line, *run in found[~known][[*KEY, STEP]].itertuples(name=None):
        raise UserError(f"{path}, line {line}: the results have no run of {_named(run)}")
    return found


def _lines(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Return the line and the values of each row.

    Where there is no column but the others that are ``needed``, the configuration may be missing, or the optimizer:
    that of all runs is `ALL`.
    """
    try:
        text = whole(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    rows = csv_rows(io.StringIO(text, newline=""), path)
    columns = [name.strip() for name in next(rows, (1, []))[1]]
    if not columns:
        raise UserError(f"{path} is empty; expected the columns {', '.join(needed)} in its first line")
    alike = {name: ALL for name in KEY[:2] if sorted([*columns, name]) == sorted(needed)}
    for name in needed:
        if columns.count(name) != 1 and name not in alike:
            wrong = "" if name in columns else did_you_mean(name, columns)
            raise UserError(f"{path}, line 1: {columns.count(name) or 'no'} column {name!r}{wrong}")
    for line, values in rows:
        yield line, alike | dict(zip(columns, (value.strip() for value in values), strict=True))


def _told_by(place: str, name: str, text: str) -> str | int:
    if name in KEY[:2]:
        if not text:
            raise UserError(f"{place}: {name} is empty")
        return text
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{place}: {name} is {text!r}; expected a whole number") from None


def _loss(place: str, metric: str, text: str) -> float:
    try:
        value = math.nan if text == DIVERGED else float(text)
    except ValueError:
        value = math.inf
    if text != DIVERGED and not math.isfinite(value):
        raise UserError(f"{place}: {metric} is {text!r}; expected a finite number, or {DIVERGED!r} if the run diverged")
    return value


def _named(run: Sequence[str | int]) -> str:
    configuration, optimizer, seed, *step = run
    return f"{configuration!r} under {optimizer!r} with seed {seed}" + "".join(f" at step {one}" for one in step)
