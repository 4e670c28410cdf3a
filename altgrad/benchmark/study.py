"""What a study takes: cells an hour of a throw-away grid that really trains, and where a cell's time goes.

The grid is run as `make repro` runs the project's own, on a copy of it whose graphs have been compiled before, up to
its last diagnosis; the report is not written.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from altgrad.benchmark.copied import copy_without_report, run_all
from altgrad.config.files import read_json, read_yaml, write_text

FORMATS, ARMS, STEPS = ["bf16", "E4M3", "E3M4", "E5M2"], ["adamw", "stiff_update"], 300
SEEDS, WARM_UP = [1, 2, 3], ([0], 100)  # as few steps as are compiled for
PARTS = ("steps_s", "loading_s", "observe_s", "evaluate_s", "around_s", "outside_s")


def measure(project: Path, model: str, jobs: int, cache: Path) -> dict[str, Any]:
    """Return what a study of ``model`` takes with ``jobs`` cells at a time; ``cache`` keeps its graphs.

    ``cells_per_hour``; ``cell_s``, the seconds of one job that a cell takes; and its parts, seconds on the mean cell:
    ``steps_s`` in optimizer steps, ``loading_s`` of a graph, ``observe_s`` in instrumented passes, ``evaluate_s``
    in evaluations, ``around_s`` in the rest of training (building the model, writing what it found), ``outside_s``
    for all else: diagnosis, hand-over to DVC, waiting.
    """
    with tempfile.TemporaryDirectory(prefix="altgrad-study-") as name:
        folder = Path(name)
        copy_without_report(project, folder)
        variables = {"ALTGRAD_COMPILE_CACHE": str(cache.resolve())}
        set_grid(folder, model, *WARM_UP)
        run_all(folder, "--jobs", str(jobs), **variables)
        shutil.rmtree(folder / "data/runs")
        set_grid(folder, model, SEEDS, STEPS)
        took = run_all(folder, "--jobs", str(jobs), **variables)
        timings = [read_json(path) for path in sorted((folder / "data/runs").glob("*/timing.json"))]
    cells = len(timings)
    per_cell = jobs * took / cells
    return {
        "model": model, "name": "a grid of cells", "cells": cells, "steps": STEPS, "jobs": jobs,
        "took_s": round(took, 1), "cells_per_hour": round(3600 * cells / took),
        "cell_s": round(per_cell, 2), **_parts(timings, per_cell),
    }  # fmt: skip


def _parts(timings: list[dict[str, Any]], per_cell: float) -> dict[str, float]:
    """Return the means of what cells say of themselves, in the order of `PARTS`; they add up to ``per_cell``."""

    def mean(name: str) -> float:
        return statistics.mean(timing[name] for timing in timings)

    loading = statistics.mean(timing["compile_s"] or 0.0 for timing in timings)
    inside = mean("train_s") - loading - mean("observe_s") - mean("evaluate_s")
    found = inside, loading, mean("observe_s"), mean("evaluate_s"), mean("total_s") - mean("train_s")
    return {name: round(seconds, 2) for name, seconds in zip(PARTS, (*found, per_cell - mean("total_s")), strict=True)}


def set_grid(folder: Path, model: str, seeds: list[int], steps: int) -> None:
    """Let the project in ``folder`` train `FORMATS` x `ARMS` of ``model`` with these seeds and steps."""
    params = read_yaml(folder / "params.yaml")
    params["model"], params["train"]["steps"] = model, steps
    params["grid"] |= {
        "formats": FORMATS, "optimizers": ARMS, "seeds": seeds, "lr_scales": [1], "baseline": FORMATS[0],
    }  # fmt: skip
    write_text(folder / "params.yaml", json.dumps(params))
