"""Which cells `budget.early_stop` gives up, by what they and their rivals have written so far.

Cells that differ in their learning rate alone have the same initial weights and the same batches, so that their
training losses can be held against each other early. A cell is given up when another rate's loss, over the second tenth
of the steps, lies below its own by more than `MARGIN`. The cells of the grid's first seed are never given up: on them
it can be seen whether one that would have been ends best.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from altgrad.config.cell import Cell, run_names
from altgrad.execution.executor import Task

STEP, TRAIN_LOSS = 0, 3  # places in a row of history.jsonl
TOKENS = Path("data/tokens")
LOOK_EVERY = 2.0  # seconds
FIRST, LAST = 0.1, 0.2  # shares of the steps whose losses count
MARGIN = 0.2  # nats per token


class EarlyStop:
    """The rule over the cells of the grid."""

    def __init__(self, keys: Sequence[str]) -> None:
        cells = {key: Cell.read(Path(f"data/grid/{key}.json")) for key in keys}
        self._scratch = {key: Path("scratch", name) for key, name in run_names(cells.values(), TOKENS).items()}
        self._steps = {key: cell.train.steps for key, cell in cells.items()}
        groups: dict[tuple[str, str, int], list[str]] = {}
        for key, cell in cells.items():
            groups.setdefault((cell.format, cell.optimizer, cell.seed), []).append(key)
        self._rivals = {key: [other for other in group if other != key] for group in groups.values() for key in group}
        first = next(iter(cells.values())).seed if cells else None
        self._judged = {key for key, cell in cells.items() if cell.seed != first}
        self._losses: dict[str, float] = {}  # that are final

    def given_up(self, tasks: Collection[Task]) -> list[Task]:
        judged = [task for task in tasks if task.stage == "train" and task.key in self._judged]
        return [task for task in judged if is_beaten(self._loss(task.key), map(self._loss, self._rivals[task.key]))]

    def _loss(self, key: str) -> float | None:
        if key not in self._losses:
            found = early_loss(_rows(Path(f"data/runs/{key}/history.csv"), self._scratch[key]), self._steps[key])
            if found is None:
                return None
            self._losses[key] = found
        return self._losses[key]


def early_loss(rows: Iterable[tuple[float, float | None]], steps: int) -> float | None:
    """Return the mean training loss over the second tenth of ``steps``, ``None`` before it is over.

    ``rows``: step and training loss, ``None`` where it was not logged or is not finite. A run that has no finite loss
    there has lost: infinity.
    """
    seen, losses, last = False, [], 0.0
    for step, loss in rows:
        last = max(last, step)
        if FIRST * steps < step <= LAST * steps:
            seen = True
            losses += [loss] if loss is not None else []
    if last < LAST * steps:
        return None
    return sum(losses) / len(losses) if losses else float("inf") if seen else None


def is_beaten(own: float | None, rivals: Iterable[float | None]) -> bool:
    """Whether one of the rivals' early losses lies below ``own`` by more than `MARGIN`."""
    best = min((loss for loss in rivals if loss is not None), default=None)
    return own is not None and best is not None and own - best > MARGIN


def _rows(history: Path, scratch: Path) -> list[tuple[float, float | None]]:
    if history.exists():
        with open(history, newline="", encoding="utf-8") as file:
            return [
                (float(row["step"]), float(loss) if (loss := row["train_loss"]) else None)
                for row in csv.DictReader(file)
            ]
    found = []
    with suppress(OSError):  # it may end while it is read, or have nothing yet
        for line in (scratch / "history.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(json.JSONDecodeError):  # the last line may be cut off
                row = json.loads(line)
                found.append((row[STEP], row[TRAIN_LOSS]))
    return found
