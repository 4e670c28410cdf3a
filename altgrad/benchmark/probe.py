"""Measures how long runs take on this machine, from a few steps of each; `altgrad.execution` calls it for estimates."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from altgrad.common.errors import run_stage
from altgrad.common.files import read_json, write_text
from altgrad.common.fingerprint import discard_finished
from altgrad.config import Cell, load_params

STEPS, FEWEST = 24, 4
ENOUGH = 3.0  # seconds that the steps of the second run should take
LONGEST = 30.0  # seconds after which no further kind of cell is begun
NAME = f"probe.{os.getpid()}"  # key of the cell that is trained: no grid and no other probe uses it


def measure(key: str, root: Path, settings: Any, *, eager: bool = False) -> dict[str, float]:
    """Train the cell ``key`` of the project ``root`` twice with few steps, diagnose it, and return its seconds by part.

    The first run has `FEWEST` steps; the second has as many as fit into `ENOUGH` seconds, at most `STEPS`. ``first_s``
    is the second run's time if it were the first of its process, compiling included. The other times are of the second
    run: ``step_s`` (median) and ``step_p90_s`` per step, ``evaluate_s`` per evaluation, ``observe_s`` per observation
    by the monitors, ``diagnose_s`` of the diagnosis, and ``setup_s`` of the rest of training. ``steps`` is its length.

    ``settings`` is the section ``diagnose`` of params.yaml. With ``eager`` nothing is compiled.
    """
    from altgrad.diagnostics import diagnose_cell
    from altgrad.training import train_cell

    whole = Cell.read(root / "data/grid" / f"{key}.json")
    compiles = "on" if whole.train.compiles and not eager else "off"  # as in a whole run: auto depends on the steps
    tokens, steps, took = root / "data/tokens", FEWEST, []
    with tempfile.TemporaryDirectory(prefix="altgrad-probe-") as folder:
        place = Path(folder)
        run = place / "run"
        for _ in range(2):
            short = {"steps": steps, "eval_every": steps, "checkpoint_every": steps, "compile": compiles}
            looks = {"every": steps // 2, "intervals": {}}
            cell = whole.model_dump(mode="json")
            cell |= {"key": NAME, "train": cell["train"] | short, "monitor": cell["monitor"] | looks}
            write_text(place / "cell.json", Cell.model_validate(cell).to_json())
            shutil.rmtree(run, ignore_errors=True)
            began = time.perf_counter()
            train_cell(Cell.read(place / "cell.json"), tokens, run, root)
            took.append(time.perf_counter() - began)
            discard_finished(root, NAME)
            timing = read_json(run / "timing.json")
            measured = steps
            steps = max(FEWEST, min(STEPS, int(ENOUGH / (timing["step_ms_median"] / 1e3))))
        diagnosing: list[float] = []
        while len(diagnosing) < 2 and sum(diagnosing) < ENOUGH:  # the first loads what the others have
            began = time.perf_counter()
            diagnose_cell(place / "cell.json", run, place / "diagnosis.json", place / "rows.parquet", tokens, settings)
            diagnosing.append(time.perf_counter() - began)
    parts = {
        "step_s": timing["step_ms_median"] / 1e3, "evaluate_s": timing["evaluate_s"] / 2,
        "observe_s": timing["observe_s"] / 3,
    }  # fmt: skip
    rest = took[1] - measured * parts["step_s"] - timing["evaluate_s"] - timing["observe_s"]
    return {
        "steps": measured, "first_s": took[0] + (measured - FEWEST) * parts["step_s"], **parts,
        "step_p90_s": timing["step_ms_p90"] / 1e3, "setup_s": max(0.0, rest), "diagnose_s": min(diagnosing),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print a line of JSON per cell key in ``arguments``, none after `LONGEST` s. ``--eager``: compile nothing."""
    settings, began = load_params().diagnose, time.perf_counter()
    keys = [argument for argument in arguments if argument != "--eager"]
    for key in keys:
        if key != keys[0] and time.perf_counter() - began > LONGEST:
            return
        with redirect_stdout(sys.stderr):
            found = measure(key, Path().resolve(), settings, eager=len(keys) < len(arguments))
        print(json.dumps({"key": key} | found), flush=True)


if __name__ == "__main__":
    run_stage(main)
