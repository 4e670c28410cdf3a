"""Follow cells while they train, for people and for trackers: the state, the progress and the results of each.

The files that training writes are read, and nothing is written. A look reads the new parts of each cell's files:
``history.jsonl`` while the cell trains, ``history.csv`` and ``metrics.json`` after training, and the flags after
diagnosis. So training does not depend on watchers, and a watcher that begins late sees the same as one from the
beginning.
"""

import csv
import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.config.tasks import HISTORY, ON_VALIDATION, Compared
from altgrad.execution import HISTORY_FILE, Task

AT_ONCE = 1 << 20  # bytes that one look reads at most; the next look goes on
COLUMNS = (*HISTORY, *ON_VALIDATION.values())  # a classifier alone has the last of them
WAITS, TRAINS, PAUSED, FAILED, TRAINED, DIAGNOSED = "waits", "trains", "paused", "failed", "trained", "diagnosed"
SILENT = 120  # seconds without a new row or output after which a cell counts as paused


class Lines:
    """Reads the complete lines of ``path`` that have not been read yet.

    A resumed run replaces the file. The next call of `new` then sets ``restarted`` and returns the lines of the new
    file from its beginning; earlier lines no longer hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restarted = False
        self._offset = 0
        self._inode: int | None = None

    def new(self) -> list[bytes]:
        """Return the lines completed since the last call, without line ends; none if there is no file."""
        self.restarted = False
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below; here only its absence is expected
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            known, self._inode = self._inode, status.st_ino
            if known not in (None, status.st_ino) or status.st_size < self._offset:
                self._offset, self.restarted = 0, True
            file.seek(self._offset)
            complete, end, _ = file.read(AT_ONCE).rpartition(b"\n")
        self._offset += len(complete) + len(end)
        return complete.split(b"\n") if end else []


@dataclass
class HistoryRow:
    """A logged step of a cell: the columns of history.csv, ``None`` where nothing was measured.

    ``recipe`` names the recipe of that step in a run that changes its recipe; else it is empty.
    """

    step: int
    values: dict[str, float | None]
    recipe: str = ""


@dataclass
class Seen:
    """A cell as it was at the last look.

    ``settings`` is the cell's resolved file. ``metrics`` and ``timing`` are its metrics.json and timing.json, empty
    before it has trained. ``why`` is the reason if it failed. ``recipes`` has each recipe so far with its first logged
    step.
    """

    key: str
    settings: dict[str, Any]
    state: str = WAITS
    step: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    flags: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""
    recipes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return self.settings["train"]["steps"]

    @property
    def is_over(self) -> bool:
        return self.state in (TRAINED, DIAGNOSED)

    @property
    def outcome(self) -> str:
        """The outcome of training, such as ``completed``; empty while the cell trains."""
        return self.metrics.get("outcome", "")


@dataclass(frozen=True)
class Change:
    """The news of a cell. If ``again``, its earlier rows no longer hold and ``rows`` start from the beginning."""

    cell: Seen
    rows: list[HistoryRow]
    again: bool = False


class Project:
    """The cells of the project in ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._grid = root / "data/grid/index.json"
        self.cells: dict[str, Seen] = {}
        self.baseline = ""
        self.compared = Compared()
        self.recorded = False  # whether another program trains the runs and `altgrad.integrations` records them
        self.restarted = False  # whether the last look found another grid
        self._index: tuple[int, int] | None = None
        self._followed: dict[str, _Followed] = {}

    @property
    def is_planned(self) -> bool:
        return self._grid.exists()

    def look(self) -> list[Change]:
        """Return the changes since the last look; after another grid was planned, all changes from the beginning.

        Raises :class:`UserError` if no grid has been planned.
        """
        if not self.is_planned:
            raise UserError(f"no grid to watch at {self._grid}; start one with make repro")
        status = self._grid.stat()
        identity = status.st_ino, status.st_mtime_ns
        self.restarted = identity != self._index
        if self.restarted:
            content, self._index = read_json(self._grid), identity
            self.baseline = content["params"]["grid"]["baseline"]
            self.compared = Compared.of(content["params"])
            self.recorded = content.get("recorded", False)
            self.cells = {key: Seen(key, read_json(self._grid.with_name(f"{key}.json"))) for key in content["cells"]}
            self._followed = {key: _Followed(self.root, cell) for key, cell in self.cells.items()}
        running = _scratch_folders(self.root)
        changes = (self._followed[key].look(running.get(key)) for key in self.cells)
        return [change for change in changes if change]


class _Followed:
    """One cell, and the last step that has been read of it."""

    def __init__(self, root: Path, cell: Seen) -> None:
        self._cell = cell
        self._run, self._diagnosis = root / "data/runs" / cell.key, root / "data/diag" / f"{cell.key}.json"
        self._planned = root / "data/grid" / f"{cell.key}.json"
        tasks = [Task(stage, cell.key, (), 1) for stage in ("train", "diagnose")]
        self._log, self._failures = root / tasks[0].log, [root / task.failed for task in tasks]
        self._lines: Lines | None = None
        self._read_to = -1  # the last step that has been read

    def look(self, scratch: Path | None) -> Change | None:
        cell = self._cell
        before = _facts(cell)
        rows, again = [], False
        if (self._run / "timing.json").exists():  # the last file that a trained cell writes
            if not cell.is_over:
                rows = self._finish()
            self._diagnose()
        else:
            if cell.is_over:  # its settings have changed, and it will train anew
                again = True
                cell.metrics, cell.timing, cell.flags = {}, {}, []
                self._lines = None
            if scratch:
                rows, restarted = self._read(scratch / HISTORY_FILE)
                again = again or restarted
            cell.state = self._state(scratch)
            cell.why = self._failures[0].read_text(encoding="utf-8").strip() if cell.state == FAILED else ""
            if again:
                self._read_to = -1
        cell.recipes = [] if again else cell.recipes
        for row in rows:
            if row.recipe and (not cell.recipes or cell.recipes[-1][1] != row.recipe):
                cell.recipes.append((row.step, row.recipe))
        self._read_to = rows[-1].step if rows else self._read_to
        cell.step = max(0, self._read_to)
        return Change(cell, rows, again) if rows or again or _facts(cell) != before else None

    def _finish(self) -> list[HistoryRow]:
        """Read the results of a trained cell into the cell; return the rows that were not read while it trained."""
        cell = self._cell
        cell.metrics, cell.timing = read_json(self._run / "metrics.json"), read_json(self._run / "timing.json")
        cell.state, cell.why, self._lines = TRAINED, "", None
        with open(self._run / "history.csv", encoding="utf-8", newline="") as file:
            found = csv.DictReader(file)
            names = [name for name in COLUMNS if name in (found.fieldnames or ())]
            rows = [
                _row([*(float(line[name]) if line[name] else None for name in names), line.get("recipe", "")])
                for line in found
            ]
        return [row for row in rows if row.step > self._read_to]

    def _diagnose(self) -> None:
        """Set the state and flags of a trained cell from its diagnosis file, or ``why`` if the diagnosis failed."""
        cell = self._cell
        if self._diagnosis.exists():
            if cell.state != DIAGNOSED:
                cell.state, cell.flags = DIAGNOSED, read_json(self._diagnosis)["flags"]
        else:
            failed = self._failures[1]
            cell.state = TRAINED
            cell.why = failed.read_text(encoding="utf-8").strip() if failed.exists() else ""

    def _read(self, history: Path) -> tuple[list[HistoryRow], bool]:
        """Return the new rows of a training cell from ``history``, and whether its earlier rows no longer hold."""
        moved = self._lines is not None and self._lines.path != history
        if self._lines is None or moved:
            self._lines = Lines(history)
        found = self._lines.new()
        return [_row(json.loads(line)) for line in found], moved or self._lines.restarted

    def _state(self, scratch: Path | None) -> str:
        if self._failures[0].exists():
            return FAILED
        if scratch is None or _changed(scratch / HISTORY_FILE) < _changed(self._planned):
            return WAITS
        last = max(_changed(scratch / HISTORY_FILE), _changed(self._log))
        return TRAINS if time.time() - last < SILENT else PAUSED


def _facts(cell: Seen) -> tuple[object, ...]:
    """Return the state, step, reason of failure and number of flags: a new value of one makes a `Change`."""
    return cell.state, cell.step, cell.why, len(cell.flags)


def _row(values: list[Any]) -> HistoryRow:
    *numbers, recipe = values if isinstance(values[-1], str) else [*values, ""]
    named = dict(zip(COLUMNS, numbers, strict=False))
    return HistoryRow(int(named.pop("step")), named, recipe)


def _changed(path: Path) -> float:
    """Return the modification time of ``path`` in seconds; minus infinity if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return -math.inf


def _scratch_folders(root: Path) -> dict[str, Path]:
    """Return the newest scratch folder of each cell, by key. Folders of earlier settings may lie beside it."""
    found: dict[str, Path] = {}
    for history in (root / "scratch").glob(f"*/{HISTORY_FILE}"):
        key = history.parent.name.rpartition("-")[0]
        if key not in found or _changed(found[key] / HISTORY_FILE) < _changed(history):
            found[key] = history.parent
    return found
