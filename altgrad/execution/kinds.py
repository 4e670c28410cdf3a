"""What cells that take equally long have in common, and the seconds that such cells took here before.

Cells that differ in seed, learning rate and the numbers of a format take equally long: they are of one kind.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from altgrad.common.files import read_json, write_json
from altgrad.execution.executor import Task

COMPILES = 8.0  # seconds that a first run may take longer than a second where graphs are loaded and none is compiled
TOOK = Path("scratch/took.json")  # seconds of the tasks of earlier runs, by kind and stage, and of the last report
REPORT, OF_A_CELL = 6.0, 0.05  # seconds of a report before one was timed: in all, and more for each cell; on two cores

Settings = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """What cells of a kind take, in seconds.

    ``step`` of training, ``evaluate`` and ``observe`` each time, ``setup`` for the rest of training, ``diagnose``, and
    ``load`` in each process before the first of them.
    """

    step: float
    evaluate: float
    observe: float
    setup: float
    diagnose: float
    load: float

    @classmethod
    def of(cls, probes: Sequence[Mapping[str, float]]) -> Kind:
        """Return the mean over processes of what `altgrad.benchmark.probe` measured."""

        def mean(name: str) -> float:
            return sum(probe[name] for probe in probes) / len(probes)

        parts = ("step", "evaluate", "observe", "setup", "diagnose")
        step, evaluate, observe, setup, diagnose = (mean(f"{name}_s") for name in parts)
        again = setup + mean("steps") * step + 2 * evaluate + 3 * observe
        return cls(step, evaluate, observe, setup, diagnose, load=max(0.0, mean("first_s") - again))

    def seconds(self, task: Task, cell: Settings) -> float:
        if task.stage == "diagnose":
            return self.diagnose
        train, monitor = cell["train"], cell["monitor"]
        steps = train["steps"]
        evaluations = 2 + (steps - 1) // train["eval_every"]  # before the first step and after the last
        looks = 1 + steps // monitor["every"] if monitor.get("groups", True) else 0
        return self.setup + steps * self.step + evaluations * self.evaluate + looks * self.observe + self.diagnose


def kind_of(cell: Settings) -> str:
    """Return a text that cells which take equally long have in common."""
    recipes = json.loads(json.dumps([of["rules"] for of in (cell, *cell.get("schedule", []))]))
    for rule in chain.from_iterable(recipes):
        for tensor in rule.values():
            if isinstance(tensor, dict):
                tensor.pop("format", None)
    arm = {name: value for name, value in cell["arm"].items() if not isinstance(value, float | list)}
    return json.dumps([cell["model"], cell["train"], cell["monitor"], arm, *recipes], sort_keys=True)


def remember(took: Mapping[Task, float], jobs: int) -> None:
    """Keep the seconds that tasks took, ``jobs`` at a time, for the next estimate."""
    kept = _kept()
    by: dict[str, dict[str, list[float]]] = {}
    for task, seconds in took.items():
        timing, cell = Path(f"data/runs/{task.key}/timing.json"), Path(f"data/grid/{task.key}.json")
        if not timing.exists() or read_json(timing).get("resumed"):  # such a run took less than a whole one
            continue
        kind = kind_of(read_json(cell))
        by.setdefault(_place(kind, jobs), {}).setdefault(task.stage, []).append(seconds)
    for place, stages in by.items():
        train, diagnose = (sorted(stages.get(stage, [])) for stage in ("train", "diagnose"))
        own = {"diagnose": median(diagnose)} if diagnose else {}
        if len(train) > jobs:  # the first in each process loads graphs and loops, or compiles them, which happens once
            usual = median(train[:-jobs])
            own |= {"train": usual, "load": min(COMPILES, train[-1] - usual)}
        kept[place] = kept.get(place, {}) | own
    if by:
        write_json(TOOK, kept)


def remembered(kinds: Iterable[str], jobs: int) -> dict[str, Kind]:
    """Return the seconds of ``kinds`` in earlier runs here, ``jobs`` at a time, without kinds that have not run."""
    kept = _kept()
    took = {kind: kept.get(_place(kind, jobs), {}) for kind in kinds}
    return {
        kind: Kind(0.0, 0.0, 0.0, known["train"], known["diagnose"], known["load"])
        for kind, known in took.items() if {"train", "diagnose", "load"} <= known.keys()
    }  # fmt: skip


def remember_report(seconds: float) -> None:
    """Keep the seconds that the report of the grid took."""
    cells = len(read_json(Path("data/grid/index.json"))["cells"])
    write_json(TOOK, _kept() | {"report": {"seconds": seconds, "cells": cells}})


def report_seconds(cells: int) -> float:
    """Return what the report of ``cells`` will take, by the last one if one was timed here."""
    last = _kept().get("report")
    return last["seconds"] + OF_A_CELL * (cells - last["cells"]) if last else REPORT + OF_A_CELL * cells


def _kept() -> dict[str, Any]:
    return read_json(TOOK) if TOOK.exists() else {}


def _place(kind: str, jobs: int) -> str:
    return hashlib.sha256(json.dumps([kind, jobs, platform.node(), platform.processor()]).encode()).hexdigest()[:16]
