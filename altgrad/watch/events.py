"""The events that the page reads: a list that only grows. A page asks for the events after its last one.

An event is a JSON array: its kind, then its values.

- ``["grid", {...}]``: the cells and their common settings; always the first event. Another grid begins another list.
- ``["rows", cell, again, [[step, train_loss, value, grad_norm], ...]]``: logged steps. ``cell`` is
  the cell's number in the grid, and ``value`` the validation loss, or the task's metric on validation data.
  ``again`` is 1 if the cell's earlier rows no longer hold.
- ``["cell", cell, {...}]``: state, step, outcome, final loss and flags of a cell, and the recipes that it changed to.
- ``["standing", [...]]``: the comparison so far, as :func:`standing` returns it.

An answer also has the pace of the study, the time that is left, and the price of an hour.
"""

from __future__ import annotations

import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from altgrad.config.tasks import Compared
from altgrad.execution import BEGAN
from altgrad.watch import FAILED, PAUSED, TRAINS, Change, HistoryRow, Project, Seen

WINDOW = 120  # seconds over which the pace is measured
COMPLETED = "completed"
EVERY = 1.0  # seconds between two looks at the files, however many pages ask
POINTS = 100  # rows of a cell that are sent besides those with a validation loss, about
AT_ONCE = 60_000  # approximate bytes of events in an answer; a page asks once a second


class Pace:
    """Measures the steps per second of all cells, and predicts the time that the remaining steps take.

    ``began``: the file that exists while cells run, made when the first began.
    """

    def __init__(self, began: Path) -> None:
        self._began = began
        self._looks: deque[tuple[float, int]] = deque()
        self._left = 0
        self._goes = False

    def look(self, cells: Iterable[Seen]) -> None:
        now = time.monotonic()
        done = self._left = 0
        self._goes = False
        for cell in cells:
            step = cell.steps if cell.is_over else cell.step
            done += step
            self._left += 0 if cell.is_over or cell.state in (FAILED, PAUSED) else cell.steps - step
            self._goes = self._goes or cell.state == TRAINS
        if self._looks and done < self._looks[-1][1]:  # a cell began anew
            self._looks.clear()
        self._looks.append((now, done))
        while now - self._looks[0][0] > WINDOW and len(self._looks) > 2:
            self._looks.popleft()

    def summary(self) -> dict[str, float | None]:
        """Return ``steps_per_s`` over two minutes, ``seconds_left`` and ``elapsed`` (s); each ``None`` if unknown."""
        (began, first), (ended, last) = self._looks[0], self._looks[-1]
        rate = (last - first) / (ended - began) if ended > began else 0.0
        goes = self._goes and rate > 0
        return {
            "steps_per_s": rate if goes else None, "seconds_left": self._left / rate if goes else None,
            "elapsed": time.time() - self._began.stat().st_mtime if self._began.exists() else None,
        }  # fmt: skip


def standing(cells: Iterable[Seen], baseline: str, compared: Compared) -> list[dict[str, Any]]:
    """Return a row for each format (or recipe) and optimizer of the grid with a completed cell, in grid order.

    ``loss`` is the mean of the ``compared`` metric, such as the final validation loss, at the best learning rate
    ``lr_scale``. The mean is over the completed seeds, ``seeds`` of ``planned``. ``difference`` is the report's Δ loss
    to the format ``baseline``: the mean over seeds that both completed, each at its own best rate. ``low`` and ``high``
    are the ends of its 95 % interval. All three are ``None`` for the baseline, and while no value exists.
    """
    from altgrad.reporting.statistics import (  # loads pandas, which is not needed before a cell has completed
        PairedLosses,
        Run,
    )

    of = [(cell, cell.settings) for cell in cells]
    seeds = list(dict.fromkeys(own["seed"] for _, own in of))
    rates = sorted({own["lr_scale"] for _, own in of})
    identities = [((own["format"], _arm(own), own["lr_scale"]), own["seed"]) for _, own in of]
    runs, by = (
        PairedLosses.of(((*i, _final(cell, column)) for i, (cell, _) in zip(identities, of, strict=True)), seeds)
        for column in (compared.final, compared.on_validation)  # the latter chooses a rate, as in the report
    )

    def chosen(entry: str, arm: str) -> Run:
        return by.best([(entry, arm, rate) for rate in rates], higher_is_better=compared.higher_is_better)

    rows = []
    for entry, arm in dict.fromkeys((own["format"], _arm(own)) for _, own in of):
        best = chosen(entry, arm)
        completed = runs.completed(best)
        if not completed:
            continue
        row = {
            "format": entry, "arm": arm, "lr_scale": best[2], "seeds": completed, "planned": len(seeds),
            "loss": float(runs.of_run(best).mean()), "difference": None, "low": None, "high": None,
        }  # fmt: skip
        if entry != baseline and (baseline, arm, best[2]) in runs.place:
            base = chosen(baseline, arm)
            difference = runs.difference({best: 1, base: -1})
            if difference is not None:
                low, high = (difference.mean + side * difference.half_width for side in (-1, 1))
                row |= {"difference": difference.mean, "low": _or_none(low), "high": _or_none(high)}
        rows.append(row)
    return rows


def _arm(settings: dict[str, Any]) -> str:
    """Return a cell's optimizer, with the model behind it in a cell of ``grid.models``, such as ``adamw (nano)``."""
    model = settings.get("model_name")
    return f"{settings['optimizer']} ({model})" if model else settings["optimizer"]


def _final(cell: Seen, column: str) -> float:
    value = cell.metrics[column] if cell.outcome == COMPLETED else None
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Events:
    """The events of the project in ``root``, for any number of pages; ``price`` is per hour of this machine."""

    def __init__(self, root: Path, price: float = 0.0) -> None:
        self._project, self._price, self._began = Project(root), price, root / BEGAN
        self._lock = threading.Lock()
        self._begin()
        self._looked = -math.inf

    def after(self, list_id: str, count: int) -> dict[str, Any]:
        """Return the answer to a page that has the first ``count`` events of the list ``list_id``.

        ``events`` has the events after those, and ``list`` the ID of the present list. If that is not ``list_id``, the
        events start from the beginning. ``next`` is the ``count`` for the next call, ``more`` says whether further
        events exist already, and ``pace`` has the `Pace.summary` and the price.
        Raises :class:`altgrad.config.UserError` if there is no grid.
        """
        with self._lock:
            if time.monotonic() - self._looked >= EVERY:
                self._look()
                self._looked = time.monotonic()
            start = count if list_id == self._id and 0 <= count <= len(self._events) else 0
            end, size = start, 0
            while end < len(self._events) and size < AT_ONCE:
                size += len(self._events[end])
                end += 1
            return {
                "list": self._id, "next": end, "more": end < len(self._events),
                "pace": {"price": self._price, **self._pace.summary()},
                "events": [json.loads(event) for event in self._events[start:end]],
            }  # fmt: skip

    def _begin(self) -> None:
        self._events: list[bytes] = []
        self._id = secrets.token_hex(8)
        self._numbers: dict[str, int] = {}
        self._sent: dict[str, int] = {}  # the last step sent, by key of the cell
        self._standing: list[dict[str, Any]] = []
        self._pace = Pace(self._began)

    def _look(self) -> None:
        changes = self._project.look()
        if self._project.restarted:
            self._begin()
            cells = self._project.cells
            self._numbers = {key: number for number, key in enumerate(cells)}
            self._add("grid", _grid(cells.values(), self._project))
        for change in changes:
            number = self._numbers[change.cell.key]
            rows = self._thinned(change)
            if rows or change.again:
                self._add("rows", number, int(change.again), rows)
            self._add("cell", number, _cell(change.cell, self._project.compared.final))
        self._pace.look(self._project.cells.values())
        if any(change.again or change.cell.is_over for change in changes):
            now = standing(self._project.cells.values(), self._project.baseline, self._project.compared)
            if now != self._standing:
                self._standing = now
                self._add("standing", now)

    def _add(self, *event: Any) -> None:
        self._events.append(json.dumps(event, allow_nan=False, separators=(",", ":")).encode())

    def _thinned(self, change: Change) -> list[list[Any]]:
        """Return the rows of ``change`` to draw: all with a validation loss, and others up to about `POINTS` a cell."""
        key, apart = change.cell.key, change.cell.steps / POINTS
        last = -math.inf if change.again else self._sent.get(key, -math.inf)
        found = []
        for row in change.rows:
            if row.values["val_loss"] is not None or row.step - last >= apart:
                found.append(_point(row, self._project.compared.on_validation))
                last = row.step
        if found:
            self._sent[key] = found[-1][0]
        return found


def _grid(cells: Iterable[Seen], project: Project) -> dict[str, Any]:
    compared = project.compared
    return {
        "baseline": project.baseline,
        "measure": {"title": compared.title, "unit": compared.unit, "higher": compared.higher_is_better},
        "cells": [
            [cell.key, own["format"], _arm(own), own["seed"], own["lr_scale"], cell.steps]
            for cell in cells if (own := cell.settings)
        ],
    }


def _cell(cell: Seen, final: str) -> dict[str, Any]:
    found: dict[str, Any] = {"state": cell.state, "step": cell.step}
    if cell.metrics:
        found |= {name: cell.metrics[name] for name in ("outcome", "outcome_step", "signature")}
        found["final"] = cell.metrics[final]
        found["seconds"] = cell.timing["total_s"]
    if len(cell.recipes) > 1:
        found["changes"] = cell.recipes[1:]
    if cell.flags:
        found["flags"] = [[flag["layer"], flag["metric"], _short(flag["value"])] for flag in cell.flags]
    if cell.why:
        found["why"] = cell.why
    return found


def _point(row: HistoryRow, value: str) -> list[Any]:
    values = row.values
    return [row.step, _short(values["train_loss"]), values[value], _short(values["grad_norm"])]


def _short(value: float | None) -> float | None:
    """Return ``value`` rounded to five digits, more than a curve shows; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
