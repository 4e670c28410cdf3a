"""What a person sees of tasks while they run: a bar, a line for each run that has trained, and why one failed.

Where nobody watches the output is a file: there is no bar to redraw in it, but a line now and then.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from altgrad.common.files import read_json
from altgrad.config import cell_key
from altgrad.config.schema import Train
from altgrad.config.tasks import Compared
from altgrad.execution.executor import Outcome, Task

SHOWN_EVERY = {True: 0.5, False: 30}  # seconds, by whether someone watches or the output is a file
COMPILING = "compiling {}, a minute or so, once: the first run takes longer"
_STEPS_DONE = re.compile(rb" (\d+)/\d+ \[")


class Progress:
    """The bar of all tasks: steps if cells train, else cells that are diagnosed. Read off the tasks' logs."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._bar = tqdm(total=0, unit_scale=True, disable=not self._watched)
        self._total = 0
        self._count: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._done, self._unit = 0, ""
        self._shown = 0.0

    def add(self, tasks: Sequence[Task]) -> None:
        if not self._count and (missing := not_compiled([task.key for task in tasks if task.stage == "train"])):
            self._bar.write(COMPILING.format(" and ".join(missing)))
        self._count.update(task.stage for task in tasks)
        self._unit = self._unit or ("train" if self._count["train"] else "diagnose")
        self._bar.unit = {"train": "step", "diagnose": "cell"}[self._unit]
        self._total += sum(task.size for task in tasks if task.stage == self._unit)

    def ended(self, outcome: Outcome) -> None:
        """Count a task that has ended; of a cell that has trained, print what came of it."""
        task = outcome.task
        self._ended[task.stage] += 1
        self._done += task.size * (task.stage == self._unit)
        if task.stage == "train" and outcome.status == 0:
            self._bar.write(result_line(task.key))

    def drop(self, task: Task) -> None:
        """Take out a task that is not to be finished: its steps are not to come."""
        done = steps_done(task.log)
        self._done += done - task.size * (task.stage == self._unit)
        self._total -= task.size - done

    def show(self, running: Sequence[Task], *, last: bool = False) -> None:
        if not last and time.monotonic() - self._shown <= SHOWN_EVERY[self._watched]:
            return
        self._shown = time.monotonic()
        going = [task for task in running if task.stage == self._unit == "train"]
        done = self._done + sum(steps_done(task.log) for task in going)
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


def not_compiled(keys: Sequence[str]) -> list[str]:
    """Return what training these cells takes and was never compiled here; `altgrad.training.machine` has the place."""
    cache = Path(os.environ.get("ALTGRAD_COMPILE_CACHE") or "scratch/compiled")
    cells = [path for key in keys if (path := Path("data/grid") / f"{key}.json").exists()]
    compiles = any(Train(**read_json(path)["train"]).compiles for path in cells)
    needed = {"loops in C++": ("*/altgrad/*.so", bool(cells)), "the model": ("*/made/*.json", compiles)}
    return [what for what, (files, needs) in needed.items() if needs and not any(cache.glob(files))]


def result_line(key: str) -> str:
    """Return what came of a cell: what is compared, and by how much it is above that of the grid's baseline."""
    found = _metrics(key)
    if found is None:
        return f"{key}: no metrics"
    index = read_json(Path("data/grid/index.json"))
    compared = Compared.of(index["params"])
    name = compared.final
    if found[name] is None:
        return f"{key}: {found['outcome']} at step {found['outcome_step']} ({found['signature']})"
    baseline = cell_key(index["params"]["grid"]["baseline"], found["optimizer"], found["seed"], found["lr_scale"])
    # Runs of earlier grids stay on disk until the report is written, and may have had other settings.
    other = _metrics(baseline) if baseline in index["cells"] and baseline != key else None
    line = f"{key}: {compared.title} {found[name]:.4f}"
    if other is None or other[name] is None:
        return line
    return f"{line}, {found[name] - other[name]:+.4f} against {other['key']}"


def _metrics(key: str) -> dict[str, Any] | None:
    path = Path("data/runs") / key / "metrics.json"
    return read_json(path) if path.exists() else None


def steps_done(log: Path) -> int:
    """Return the step that the progress bar in ``log`` last showed, or 0."""
    found = _STEPS_DONE.findall(log.read_bytes()[-4096:]) if log.exists() else []
    return int(found[-1]) if found else 0


def why_it_failed(outcome: Outcome) -> str:
    """Return the last line of the task's log, which names the mistake, or the signal that its process died of."""
    if outcome.status < 0:
        name = signal.Signals(-outcome.status).name
        return f"its process was ended by {name}" + (", for want of memory perhaps" if name == "SIGKILL" else "")
    text = outcome.task.log.read_text(errors="replace") if outcome.task.log.exists() else ""
    lines = (line.strip() for line in reversed(text.replace("\r", "\n").split("\n")))
    return next((line for line in lines if line), "it said nothing")
