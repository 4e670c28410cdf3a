"""The cost of a cell: the seconds that cells of its kind took on this machine before, and the disk space.

Cells that differ only in seed, learning rate and the numbers of a format take equally long: they are of one kind.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Self

from altgrad.common.errors import UserError
from altgrad.common.files import read_json, write_json
from altgrad.config.models import CellModel
from altgrad.execution import Task

COMPILES = 8.0  # most seconds by which loading compiled graphs makes the first run of a process longer
TOOK = Path("scratch/took.json")  # seconds of earlier tasks, by kind and stage, and of the last report
REPORT, OF_A_CELL = 6.0, 0.05  # seconds of a report if none was timed: fixed, and per cell; on two cores

FLOAT = 4  # bytes of a saved weight
# Checkpoints on disk: two that are kept and one that is being written. Each has the weights and two moments.
CHECKPOINTS, MOMENTS = 3, 2
ROWS = 100_000  # bytes of a cell that do not depend on its size: rows of monitors, history, diagnosis

Settings = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """The seconds of each part of a cell, the same for all cells of one kind."""

    step: float  # of one training step
    evaluate: float  # of one evaluation
    observe: float  # of one look of the monitors
    setup: float  # of the rest of training
    diagnose: float
    load: float  # to load libraries and graphs, once in each process

    @classmethod
    def of(cls, probes: Sequence[Mapping[str, float]]) -> Self:
        """Return the mean of ``probes``, the seconds that `altgrad.benchmark.runs` measured in each process."""

        def mean(name: str) -> float:
            return sum(probe[name] for probe in probes) / len(probes)

        parts = ("step", "evaluate", "observe", "setup", "diagnose")
        step, evaluate, observe, setup, diagnose = (mean(f"{name}_s") for name in parts)
        again = setup + mean("steps") * step + 2 * evaluate + 3 * observe
        return cls(step, evaluate, observe, setup, diagnose, load=max(0.0, mean("first_s") - again))

    def seconds(self, task: Task, cell: Settings) -> float:
        """Return the seconds of ``task``, without ``load``; training includes the diagnosis of ``cell``."""
        if task.stage == "diagnose":
            return self.diagnose
        train, monitor = cell["train"], cell["monitor"]
        steps = train["steps"]
        evaluations = 2 + (steps - 1) // train["eval_every"]  # before the first step and after the last
        looks = 1 + steps // monitor["every"] if monitor.get("groups", True) else 0
        return self.setup + steps * self.step + evaluations * self.evaluate + looks * self.observe + self.diagnose


def kind_of(cell: Settings) -> str:
    """Return the kind of a cell as a text: equal for cells that take equally long."""
    recipes = json.loads(json.dumps([part["rules"] for part in (cell, *cell.get("schedule", []))]))
    for rule in chain.from_iterable(recipes):
        for tensor in rule.values():
            if isinstance(tensor, dict):
                tensor.pop("format", None)
    arm = {name: value for name, value in cell["arm"].items() if not isinstance(value, float | list)}
    return json.dumps([cell["model"], cell["train"], cell["monitor"], arm, *recipes], sort_keys=True)


def remember(took: Mapping[Task, float], jobs: int) -> None:
    """Save the seconds that tasks took, ``jobs`` at a time, for the next estimate; resumed cells are left out."""
    kept = _kept()
    by: dict[str, dict[str, list[float]]] = {}
    for task, seconds in took.items():
        timing = Path(f"data/runs/{task.key}/timing.json")
        if not timing.exists() or read_json(timing).get("resumed"):  # a resumed run took less than a whole one
            continue
        place = _place(kind_of(read_json(Path(f"data/grid/{task.key}.json"))), jobs)
        by.setdefault(place, {}).setdefault(task.stage, []).append(seconds)
    for place, stages in by.items():
        train, diagnose = (sorted(stages.get(stage, [])) for stage in ("train", "diagnose"))
        known = {"diagnose": median(diagnose)} if diagnose else {}
        if len(train) > jobs:  # the first in each process is left out: it loads or compiles graphs and loops
            usual = median(train[:-jobs])
            known |= {"train": usual, "load": min(COMPILES, train[-1] - usual)}
        kept[place] = kept.get(place, {}) | known
    if by:
        write_json(TOOK, kept)


def remembered(kinds: Iterable[str], jobs: int) -> dict[str, Kind]:
    """Return the seconds of earlier runs here, ``jobs`` at a time, by kind; kinds that have not run are missing."""
    kept = _kept()
    took = {kind: kept.get(_place(kind, jobs), {}) for kind in kinds}
    return {
        kind: Kind(0.0, 0.0, 0.0, known["train"], known["diagnose"], known["load"])
        for kind, known in took.items() if {"train", "diagnose", "load"} <= known.keys()
    }  # fmt: skip


def remember_report(seconds: float) -> None:
    """Save the seconds that the report of the present grid took."""
    cells = len(read_json(Path("data/grid/index.json"))["cells"])
    write_json(TOOK, _kept() | {"report": {"seconds": seconds, "cells": cells}})


def report_seconds(cells: int) -> float:
    """Return the expected seconds of a report on ``cells`` cells, from the last report here or by default."""
    last = _kept().get("report")
    return last["seconds"] + OF_A_CELL * (cells - last["cells"]) if last else REPORT + OF_A_CELL * cells


def _kept() -> dict[str, Any]:
    return read_json(TOOK) if TOOK.exists() else {}


def _place(kind: str, jobs: int) -> str:
    return hashlib.sha256(json.dumps([kind, jobs, platform.node(), platform.processor()]).encode()).hexdigest()[:16]


def cell_bytes(cell: Settings, vocabulary: int) -> int:
    """Return the approximate bytes of a finished cell: its weights, their snapshots, and the gradient twice."""
    weights = CellModel.model_validate(cell["model"]).matrix_elements(vocabulary)
    return ROWS + FLOAT * weights * (1 + cell["monitor"]["probes"] + 2)


def scratch_bytes(cell: Settings, vocabulary: int) -> int:
    """Return the approximate extra bytes of a cell while it trains: checkpoints and snapshots."""
    copies = CHECKPOINTS * (1 + MOMENTS) + cell["monitor"]["probes"]
    return FLOAT * CellModel.model_validate(cell["model"]).matrix_elements(vocabulary) * copies


def disk_needed(tasks: Sequence[Task], jobs: int) -> int:
    """Return the approximate bytes of disk that ``tasks`` need, run ``jobs`` at a time.

    DVC's cache and data/ share their files. On a file system without hard links each file is stored twice.
    """
    keys = list(dict.fromkeys(task.key for task in tasks if task.stage == "train"))
    cells = [read_json(Path(f"data/grid/{key}.json")) for key in keys]
    vocabulary = read_json(Path("data/tokens/meta.json"))["vocab_size"] if cells else 0
    kept = sum(cell_bytes(cell, vocabulary) for cell in cells)
    training = sorted((scratch_bytes(cell, vocabulary) for cell in cells), reverse=True)[:jobs]
    return kept * (1 if has_links(Path("data")) else 2) + sum(training)


def has_links(folder: Path) -> bool:
    """Return whether the file system of ``folder`` has hard links."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".links-") as place:
        file = Path(place, "file")
        file.touch()
        try:
            os.link(file, file.with_name("link"))
        except OSError:
            return False
    return True


def disk_sentence(need: int) -> str:
    """Return the end of a sentence: ``about 84 MB of disk, of which 1.2 GB are free``, where ``need`` is in bytes."""
    return f"about {size(need)} of disk, of which {size(shutil.disk_usage('.').free)} are free"


def require_room(tasks: Sequence[Task], jobs: int) -> None:
    """Raise :class:`UserError`, which says what makes room, if ``tasks`` need more disk than is free."""
    need, free = disk_needed(tasks, jobs), shutil.disk_usage(".").free
    if need > free:
        raise UserError(
            f"the cells that have to run need {disk_sentence(need)}, {size(need - free)} too few; `dvc gc -w` removes "
            "cached results of other settings, and `monitor.probes: 1` keeps fewer snapshots"
        )


def size(count: float) -> str:
    """Return a number of bytes such as ``820 kB``, ``84 MB`` or ``1.2 GB``."""
    power = 1 if count < 999_500 else 2 if count < 999.5e6 else 3
    count /= 1000**power
    return f"{count:.{1 if count < 9.95 else 0}f} {' kMG'[power]}B"
