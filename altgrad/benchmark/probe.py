"""What cells of the study take on this machine, from a few steps of each: `altgrad.execution` asks for it."""

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
ENOUGH = 3.0  # seconds of steps
LONGEST = 30.0  # seconds after which no further kind of cell is begun
NAME = f"probe.{os.getpid()}"  # of the cell that is trained; neither a grid nor another probe has one of that name


def measure(key: str, root: Path, settings: Any, *, eager: bool = False) -> dict[str, float]:
    """Train a cell of ``root`` cut to `FEWEST` steps, then to as many as `ENOUGH` has room for, up to `STEPS`; diagnose
    it; return the seconds of the parts.

    ``first_s`` is what the second would have taken as the first of its process, compiling or loading graphs included;
    the others are those of the second:
    ``step_s`` of a step and ``step_p90_s`` of one that nine in ten are faster than, ``evaluate_s`` of an evaluation,
    ``observe_s`` of a look at what the monitors see, ``setup_s`` of all else in training, ``diagnose_s`` of the
    diagnosis.
    """
    from altgrad.diagnostics import diagnose_cell
    from altgrad.training import train_cell

    whole = Cell.read(root / "data/grid" / f"{key}.json")
    compiles = "on" if whole.train.compiles and not eager else "off"  # as whole runs are; auto looks at the steps
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
    first = took[0] + (measured - FEWEST) * parts["step_s"]
    slow = {"step_p90_s": timing["step_ms_p90"] / 1e3}
    return {
        "steps": measured, "first_s": first, **parts, **slow, "setup_s": max(0.0, rest), "diagnose_s": min(diagnosing)
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print a line of JSON for each cell named, and of those after `LONGEST` seconds for none but the first.

    With ``--eager`` none is compiled.
    """
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
