"""Rows of runs from a CSV file, each checked: a mistake is one sentence with file and line."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import csv_rows
from altgrad.common.run_table import DIVERGED, KEY, STEP, read_locked

ALL = "all"  # the configuration, or the optimizer, of a table that says none


def read_rows(path: Path, metric: str, key: Sequence[str] = KEY) -> pd.DataFrame:
    """Return the losses in ``path``, those in its column ``metric``, in the order of the file.

    Columns are those of ``key``, and ``loss``, float64, NaN where the run has diverged. ``attrs["unread"]`` names the
    other columns of the file. Raises :class:`altgrad.config.UserError` for a file that is no such table, and for a run
    that stands there twice.
    """
    found: dict[tuple[str | int, ...], tuple[int, float]] = {}
    unread: list[str] = []
    for line, values in _lines(path, [*key, metric]):
        place = f"{path}, line {line}"
        run = tuple(_told_by(place, name, values[name]) for name in key)
        unread = unread or [name for name in values if name not in (*key, metric)]
        if run in found:
            first = dict(_lines(path, [*key, metric]))[found[run][0]]
            apart = [name for name in unread if name and ALL in run and values[name] != first[name]]
            rename = f", or rename what tells them apart ({', '.join(apart)}) {KEY[run.index(ALL)]}" if apart else ""
            raise UserError(f"{place}: {_named(run)} stands in line {found[run][0]} too; remove one{rename}")
        found[run] = line, _loss(place, metric, values[metric])
    if not found:
        raise UserError(f"{path}: no row below the names of the columns")
    lines, losses = zip(*found.values(), strict=True)
    rows = pd.DataFrame(list(found), lines, key).assign(loss=losses)
    rows.attrs["unread"] = unread
    return rows


def read_curves(path: Path, metric: str, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the losses by ``step`` in ``path``, a row per run and step; each run must be one of ``runs``."""
    found = read_rows(path, metric, [*KEY, STEP])
    known = pd.MultiIndex.from_frame(found[KEY]).isin(pd.MultiIndex.from_frame(runs[KEY]))
    for line, *run in found[~known][[*KEY, STEP]].itertuples(name=None):
        raise UserError(f"{path}, line {line}: the results have no run of {_named(run)}")
    return found


def _lines(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Return the line and the values of each row.

    A table may lack the column of configurations, or that of optimizers: that of all runs is `ALL` then.
    """
    try:
        text = read_locked(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    rows = csv_rows(io.StringIO(text, newline=""), path)
    columns = [name.strip() for name in next(rows, (1, []))[1]]
    if not columns:
        raise UserError(f"{path} is empty; expected the columns {', '.join(needed)} in its first line")
    if len(columns) == 1 and (separator := re.search("[;\t|]", columns[0])):
        raise UserError(f"{path}, line 1: columns are separated by {separator[0]!r}; save the table with commas")
    absent = [name for name in KEY[:2] if not any(column.lower()[:4] == name[:4] for column in columns)]
    alike = dict.fromkeys(absent[:1], ALL)
    for name in needed:
        if columns.count(name) > 1:
            raise UserError(f"{path}, line 1: {columns.count(name)} columns {name!r}; rename all but one")
        if name not in columns and name not in alike:
            hint = did_you_mean(name, columns)
            raise UserError(
                f"{path}, line 1: no column {' or '.join(map(repr, absent if name in absent else [name]))}{hint}"
                f"{'' if hint.endswith('?') else '.'} Each row is a run; --metric names the column that is compared"
            )
    for line, values in rows:
        yield line, alike | dict(zip(columns, (value.strip() for value in values), strict=True))


def _told_by(place: str, name: str, text: str) -> str | int:
    if name in KEY[:2]:
        if not text:
            raise UserError(f"{place}: {name} is empty")
        return text
    try:
        return int(re.sub(r"\.0*$", "", text))  # pandas writes 0.0 where the column had a gap
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
