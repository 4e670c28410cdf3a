"""Show how far tasks are: a progress bar, a line for each trained cell, the reason of a failure; and start trackers.

If the output goes to a file, a line every half minute replaces the bar.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.config import cell_key
from altgrad.config.schema import Train
from altgrad.config.tasks import Compared
from altgrad.execution import BEGAN, HISTORY_FILE, LOGS, Outcome, Task

SHOWN_EVERY = {True: 0.5, False: 30}  # seconds, for a terminal (True) or a file
COMPILING = "compiling {}, a minute or so, once: the first run takes longer"
TRACK = [sys.executable, "-m", "altgrad.watch.track"]
TRACK_LOG = LOGS / "tracking.log"
PATIENCE = 60  # seconds in which trackers must send the last rows


class Progress:
    """The progress bar of all tasks. It counts optimizer steps if cells train, else diagnosed cells."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._bar = tqdm(total=0, unit_scale=True, disable=not self._watched)
        self._total = 0
        self._count: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._done, self._unit = 0, ""
        self._shown = 0.0

    def add(self, tasks: Sequence[Task]) -> None:
        """Add ``tasks`` to the total; the first time, print what has to be compiled for them."""
        if not self._count and (missing := not_compiled([task.key for task in tasks if task.stage == "train"])):
            self._bar.write(COMPILING.format(" and ".join(missing)))
        self._count.update(task.stage for task in tasks)
        self._unit = self._unit or ("train" if self._count["train"] else "diagnose")
        self._bar.unit = {"train": "step", "diagnose": "cell"}[self._unit]
        self._total += sum(task.size for task in tasks if task.stage == self._unit)

    def ended(self, outcome: Outcome) -> None:
        """Count an ended task; print the result of a trained cell."""
        task = outcome.task
        self._ended[task.stage] += 1
        self._done += task.size * (task.stage == self._unit)
        if task.stage == "train" and outcome.status == 0:
            self._bar.write(result_line(task.key))

    def drop(self, task: Task) -> None:
        """Remove from the total the steps that ``task``, which was given up, will not do."""
        done = steps_done(task)
        self._done += done - task.size * (task.stage == self._unit)
        self._total -= task.size - done

    def show(self, running: Sequence[Task], *, last: bool = False) -> None:
        """Redraw the bar or print a line if `SHOWN_EVERY` has passed, or if this is the ``last`` time."""
        if not last and time.monotonic() - self._shown <= SHOWN_EVERY[self._watched]:
            return
        self._shown = time.monotonic()
        done = self._done + (sum(map(steps_done, running)) if self._unit == "train" else 0)
        counts = " ".join(f"{stage} {self._ended[stage]}/{count}" for stage, count in self._count.items())
        if not self._watched:
            tqdm.write(f"{counts}: {100 * done / self._total if self._total else 100:.0f} %", file=sys.stderr)
            return
        self._bar.n, self._bar.total = done, self._total
        self._bar.set_description(counts, refresh=False)
        self._bar.set_postfix_str(" ".join(task.key for task in running), refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


def steps_done(task: Task) -> int:
    """Return the last step that a training cell has logged since the present tasks began; 0 if none."""
    folder = task.scratch
    with suppress(OSError, ValueError):  # no row yet, or the folder is gone
        if folder and (log := folder / HISTORY_FILE).stat().st_mtime >= BEGAN.stat().st_mtime:
            complete = log.read_bytes().rpartition(b"\n")[0]
            return json.loads(complete.rpartition(b"\n")[2])[0]
    return 0


def not_compiled(keys: Sequence[str]) -> list[str]:
    """Return the names of the parts that training these cells must compile first: C++ loops, model, both or neither."""
    cache = Path(os.environ.get("ALTGRAD_COMPILE_CACHE") or "scratch/compiled")
    cells = [path for key in keys if (path := Path("data/grid") / f"{key}.json").exists()]
    compiles = any(Train(**read_json(path)["train"]).compiles for path in cells)
    needed = {"loops in C++": ("*/altgrad/*.so", bool(cells)), "the model": ("*/made/*[0-9a-f]", compiles)}
    return [what for what, (files, needs) in needed.items() if needs and not any(cache.glob(files))]


def result_line(key: str) -> str:
    """Return a line with the result of a cell: its loss, and Δ loss to the grid's baseline if that is known."""
    metrics = _metrics(key)
    if metrics is None:
        return f"{key}: no metrics"
    index = read_json(Path("data/grid/index.json"))
    compared = Compared.of(index["params"])
    name = compared.final
    if metrics[name] is None:
        return f"{key}: {metrics['outcome']} at step {metrics['outcome_step']} ({metrics['signature']})"
    line = f"{key}: {compared.title} {metrics[name]:.4f}"
    grid, seed, model = index["params"]["grid"], metrics["seed"], metrics.get("model_name")
    baseline = cell_key(grid["baseline"], metrics["optimizer"], seed, metrics["lr_scale"], model)
    # Runs of earlier grids stay on disk until the report is written, and may have had other settings.
    other = _metrics(baseline) if baseline in index["cells"] and baseline != key else None
    if other is None or other[name] is None:
        return line
    return f"{line}, {metrics[name] - other[name]:+.4f} against {baseline}"


def _metrics(key: str) -> dict[str, Any] | None:
    path = Path("data/runs") / key / "metrics.json"
    return read_json(path) if path.exists() else None


def why_it_failed(outcome: Outcome) -> str:
    """Return the last line of the task's log, which names the error, or the signal that ended its process."""
    if outcome.status < 0:
        name = signal.Signals(-outcome.status).name
        return f"its process was ended by {name}" + (", for want of memory perhaps" if name == "SIGKILL" else "")
    text = outcome.task.log.read_text(errors="replace") if outcome.task.log.exists() else ""
    lines = (line.strip() for line in reversed(text.replace("\r", "\n").split("\n")))
    return next((line for line in lines if line), "it said nothing")


@contextmanager
def tracked(trackers: Sequence[str]) -> Iterator[None]:
    """Run ``trackers`` in a process beside the cells, so that no cell waits for a network; nothing if there are none.

    Raises :class:`UserError` if one is not installed. A tracker that fails later stops no cell; a notice at the end
    names the log.
    """
    if not trackers:
        yield
        return
    checked = subprocess.run([*TRACK, "--check"], check=False, stderr=subprocess.PIPE, text=True)
    if checked.returncode:
        raise UserError(checked.stderr.strip().removeprefix("error: "))
    LOGS.mkdir(parents=True, exist_ok=True)
    with open(TRACK_LOG, "wb") as log:
        # In its own session: an interrupt from the keyboard stops the cells, whose end it must still report.
        process = subprocess.Popen(
            [*TRACK, "--until-closed"], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            print(f"notice: trackers were not told of everything; {TRACK_LOG} says why, and", file=sys.stderr)
            print("python -m altgrad.watch.track tells them the rest", file=sys.stderr)
