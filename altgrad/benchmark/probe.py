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

from altgrad.config import Cell, discard_finished, load_params, run_stage
from altgrad.config.files import read_json, write_text

STEPS = 24
NAME = f"probe.{os.getpid()}"  # of the cell that is trained; neither a grid nor another probe has one of that name


def measure(key: str, root: Path, settings: Any) -> dict[str, float]:
    """Train and diagnose a cell of ``root`` that is cut to `STEPS` steps, twice; return the seconds of its parts.

    ``first_s`` is what the first time took, compiling or loading graphs included; the others are those of the second:
    ``step_s`` of a step and ``step_p90_s`` of one that nine in ten are faster than, ``evaluate_s`` of an evaluation,
    ``observe_s`` of a look at what the monitors see, ``setup_s`` of all else in training, ``diagnose_s`` of the
    diagnosis.
    """
    from altgrad.diagnostics import diagnose_cell
    from altgrad.training import train_cell

    cell = Cell.read(root / "data/grid" / f"{key}.json").model_dump(mode="json")
    short = {"steps": STEPS, "eval_every": STEPS, "checkpoint_every": STEPS}
    looks = {"every": STEPS // 2, "intervals": {}}
    cell |= {"key": NAME, "train": cell["train"] | short, "monitor": cell["monitor"] | looks}
    tokens = root / "data/tokens"
    with tempfile.TemporaryDirectory(prefix="altgrad-probe-") as folder:
        place = Path(folder)
        write_text(place / "cell.json", Cell.model_validate(cell).to_json())
        run, took = place / "run", []
        for _ in range(2):
            shutil.rmtree(run, ignore_errors=True)
            began = time.perf_counter()
            train_cell(Cell.read(place / "cell.json"), tokens, run, root)
            took.append(time.perf_counter() - began)
            discard_finished(root, NAME)
        timing = read_json(run / "timing.json")
        diagnosing = []
        for _ in range(2):
            began = time.perf_counter()
            diagnose_cell(place / "cell.json", run, place / "diagnosis.json", place / "rows.parquet", tokens, settings)
            diagnosing.append(time.perf_counter() - began)
    parts = {
        "step_s": timing["step_ms_median"] / 1e3, "evaluate_s": timing["evaluate_s"] / 2,
        "observe_s": timing["observe_s"] / 3,
    }  # fmt: skip
    rest = took[1] - STEPS * parts["step_s"] - timing["evaluate_s"] - timing["observe_s"]
    slow = {"step_p90_s": timing["step_ms_p90"] / 1e3}
    return {"first_s": took[0], **parts, **slow, "setup_s": max(0.0, rest), "diagnose_s": min(diagnosing)}


def main(arguments: list[str]) -> None:
    """Print a line of JSON for each cell named."""
    settings = load_params().diagnose
    for key in arguments:
        with redirect_stdout(sys.stderr):
            found = measure(key, Path().resolve(), settings)
        print(json.dumps({"key": key, "steps": STEPS} | found), flush=True)


if __name__ == "__main__":
    run_stage(main)
