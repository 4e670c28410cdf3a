"""The cells of a study as runs of the trackers that `tracking:` in params.yaml names.

Every row goes to every tracker once: what each has been told is kept beside it, so that a run that is resumed, or that
was there before, continues. Training does not wait for a tracker, and does not notice if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from altgrad.config import Cell, UserError, load_params, run_stage
from altgrad.config.files import write_json
from altgrad.config.scratch import run_names
from altgrad.console import handled
from altgrad.watch.project import Change, Project
from altgrad.watch.trackers import FOLDER, TRACKERS, Tracker, open_tracker, require

EVERY = 2.0  # seconds between two looks
ENDED = "ended"


class Told:
    """One tracker, and up to which step it has been told of each run; the rest is left to the next time."""

    def __init__(self, tracker: Tracker, path: Path) -> None:
        self._tracker, self._path = tracker, path
        self._steps: dict[str, int | str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self._open: set[str] = set()

    def tell(self, run: str, change: Change) -> None:
        """Pass on what is new of a run: its rows, and its end."""
        last, cell = self._steps.get(run, -1), change.cell
        if isinstance(last, str):  # `ENDED`
            return
        rows = [row for row in change.rows if row.step > last]
        if (rows or cell.is_over) and run not in self._open:
            self._tracker.begin(run, cell.settings)
            self._open.add(run)
        for row in rows:
            measured = {name: value for name, value in row.values.items() if value is not None}
            self._tracker.log(run, row.step, measured)
            self._steps[run] = row.step
        if cell.is_over:
            numbers = {name: value for name, value in cell.metrics.items() if _is_number(value)}
            self._tracker.end(run, numbers, cell.outcome)
            self._open.remove(run)
            self._steps[run] = ENDED

    def close(self) -> None:
        self._tracker.close()
        self.keep()

    def keep(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, self._steps)


class Tracking:
    """Passes on what the cells of the project in ``root`` do."""

    def __init__(self, root: Path, told: Sequence[Told]) -> None:
        self._root, self._told = root, told
        self._project = Project(root)
        self._runs: dict[str, str] = {}  # by cell

    def look(self) -> None:
        """Tell each tracker what is new; nothing where no grid has been planned yet."""
        if not self._project.is_planned:
            return
        changes = self._project.look()
        if self._project.restarted:
            self._runs = {}
        if changes and self._project.recorded:
            self._runs = {key: key for key in self._project.cells}
        elif changes and not self._runs:  # not before: while nothing trains, the tokens may still be made
            cells = (Cell.model_validate(cell.settings) for cell in self._project.cells.values())
            self._runs = run_names(cells, self._root / "data/tokens")
        for one in self._told:
            for change in changes:
                one.tell(self._runs[change.cell.key], change)
            one.keep()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _set_at_end_of_input(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


def main(arguments: list[str]) -> None:
    """Tell the trackers of all that they have not been told of."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.watch.track", description=__doc__.split("\n")[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--follow", action="store_true", help="and of what cells do from now on, until interrupted")
    group.add_argument("--until-closed", action="store_true", help="the same, until standard input is closed")
    group.add_argument("--check", action="store_true", help="tell nobody, but fail if a tracker is not installed")
    parser.add_argument("--tracker", action="append", choices=TRACKERS, help="instead of those in params.yaml")
    options = parser.parse_args(arguments)
    names = options.tracker or load_params().tracking
    if not names:
        raise UserError("tracking in params.yaml names no tracker; name one, such as tracking: [tensorboard]")
    for name in names:
        require(name)
    if options.check:
        return
    over = threading.Event()
    if options.until_closed:
        threading.Thread(target=_set_at_end_of_input, args=(over,), daemon=True).start()
    with ExitStack() as stack:
        stack.enter_context(handled(lambda signum, frame: over.set()))
        told = [stack.enter_context(closing(Told(open_tracker(n), FOLDER / f"{n}.json"))) for n in dict.fromkeys(names)]
        tracking = Tracking(Path(), told)
        while True:
            # Asked before the look, so that the last one sees the end.
            ending = over.is_set() or not (options.follow or options.until_closed)
            tracking.look()
            if ending:
                return
            over.wait(EVERY)


if __name__ == "__main__":
    run_stage(main)
