"""Estimate the time and cost of the cells that have to run, and choose those that fit a budget.

Cells of one kind take equally long. `altgrad.execution.costs` keeps the seconds of each kind that ran here before. For
other kinds a few steps are timed, in as many processes as cells will run in, since processes share memory and cores.
After half a minute no further kind is timed. For a GPU that the user names, the record of `make gpu` has the seconds.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.config.schema import Budget, Train
from altgrad.execution import LOGS, Task
from altgrad.execution.costs import COMPILES, Kind, Settings, kind_of, remembered, report_seconds
from altgrad.execution.dvc_api import stop_children
from altgrad.execution.pending import rest

PROBE = [sys.executable, "-m", "altgrad.benchmark.runs"]
COMPILING = 30.0  # seconds to compile the graph of a kind, once, on one core
WORTH_COMPILING = 600.0  # a grid that takes at least so many seconds is compiled for the estimate

RECORDS = Path("reports/bench")
PRICE = 2.5  # US dollars an hour of an H100, in 2026; `budget.price` replaces it
TOKENS_A_PARAMETER, RUNS = 20, 10

Record = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """The seconds of each task, and how many tasks run at a time. Training includes the cell's diagnosis."""

    seconds: dict[str, float]  # by name of the task
    cells: dict[str, Settings]  # by key of the cell
    load: float  # seconds to load libraries and graphs in each process
    jobs: int
    timed: str = ""  # a phrase: where the seconds come from
    before: float = 0.0  # seconds to start, tokenize and plan; 0 in a budget, which does not count them
    after: float = 0.0  # seconds of DVC and the report, likewise

    def of(self, tasks: Iterable[Task]) -> float:
        """Return the seconds from the start to the end of all ``tasks``; 0 if there are none."""
        work = sum(self.seconds[task.name] for task in tasks)
        return self.before + self.load + work / self.jobs + self.after if work else 0.0

    def fitting(self, tasks: Sequence[Task], limit: float) -> list[Task]:
        """Return the tasks that take at most ``limit`` seconds together: all tasks of the first seeds, in grid order.

        Comparisons are paired by seed, so one complete seed is worth more than some cells of every seed. If not even
        the first seed fits, return as many of the first tasks as fit.
        """
        seeds = list(dict.fromkeys(self.cells[task.key]["seed"] for task in tasks))
        for count in range(len(seeds), 0, -1):
            kept = [task for task in tasks if self.cells[task.key]["seed"] in seeds[:count]]
            if self.of(kept) <= limit:
                return kept
        kept = list(tasks)
        while kept and self.of(kept) > limit:
            kept.pop()
        return kept


def estimate(
    tasks: Sequence[Task], jobs: int, seconds_of: Callable[[dict[str, Settings]], dict[str, Kind]] | None = None
) -> Estimate:
    """Return the estimate for ``tasks``, run ``jobs`` at a time.

    ``seconds_of`` takes the settings of one cell of each kind and returns its seconds, both by key. By default they
    come from earlier runs or a few timed steps. Raises :class:`UserError` with the reason if a timed cell fails.
    """
    cells = {task.key: read_json(Path(f"data/grid/{task.key}.json")) for task in tasks}
    kinds = {key: kind_of(cell) for key, cell in cells.items()}
    known = {} if seconds_of else remembered(set(kinds.values()), jobs)
    first = {kind: key for key, kind in reversed(kinds.items()) if kind not in known}
    counts = Counter(kinds.values())
    # Time may not suffice for all kinds. Quantized ones come first, since they take longer than the others.
    order = sorted(first, key=lambda kind: (bool(cells[first[kind]]["rules"]), counts[kind]), reverse=True)
    asked = {first[kind]: cells[first[kind]] for kind in order}

    def by(timed: dict[str, Kind], compiling: float = 0.0) -> Estimate:
        """Return the estimate from the ``timed`` cells, with ``compiling`` seconds added to the load of each kind."""
        loaded = {key: replace(kind, load=kind.load + compiling) for key, kind in timed.items()}
        slowest = {key: max(loaded.values(), key=lambda kind: kind.step) for key in asked.keys() - loaded.keys()}
        of = known | {kind: (loaded | slowest)[key] for kind, key in first.items()}
        seconds = {task.name: of[kinds[task.key]].seconds(task, cells[task.key]) for task in tasks}
        sources = [f"earlier runs of {len(known)}"] * bool(known) + [f"a few steps of {len(timed)}"] * bool(timed)
        text = f"by {' and '.join(sources)} of {len(of)} kind{'s' * (len(of) > 1)} of cells"
        text += "; the others as the slowest of these" if len(timed) < len(first) else ""
        return Estimate(seconds, cells, sum(kind.load for kind in of.values()), jobs, text)

    if seconds_of or not asked:
        return by(seconds_of(asked) if seconds_of else {})
    if any(Train(**{name: cell["train"][name] for name in ("steps", "compile")}).compiles for cell in asked.values()):
        # Compiling may take longer than a whole small grid, whose cells take at most the time of uncompiled ones.
        estimated = by(probed(list(asked), jobs, eager=True), COMPILING / jobs)
        if estimated.of(tasks) < WORTH_COMPILING:
            return estimated
    return by(probed(list(asked), jobs))


def with_the_rest(estimated: Estimate, before: float) -> Estimate:
    """Return ``estimated`` with the other seconds of `make repro`: those ``before`` the cells, and those after them.

    DVC checks the grid after training, after diagnosis and once more. One check is run and timed here.
    """
    began = time.monotonic()
    rest()
    after = 3 * (time.monotonic() - began) + report_seconds(len(read_json(Path("data/grid/index.json"))["cells"]))
    return replace(estimated, before=before, after=after)


def choose(tasks: Sequence[Task], jobs: int, budget: Budget) -> list[Task]:
    """Return the tasks that fit ``budget``; print the estimate, and what is left out.

    Raises :class:`UserError` if no task fits.
    """
    estimated = estimate(tasks, jobs)
    print(said(estimated, tasks, budget), flush=True)
    kept = estimated.fitting(tasks, budget.limit)
    if not kept:
        raise UserError(f"the budget has room for no cell; raise {_what_limits(budget)} or make the cells smaller")
    return kept


def said(estimated: Estimate, tasks: Sequence[Task], budget: Budget) -> str:
    """Return text with the time and cost of ``tasks`` and, if ``budget`` is too small for all, what is left out."""
    kept = estimated.fitting(tasks, budget.limit)

    def amount(some: Sequence[Task]) -> str:
        seconds = estimated.of(some)
        return duration(seconds) + (f" and cost {budget.price * seconds / 3600:.2f}" if budget.price else "")

    count = len({task.key for task in tasks})
    text = f"{count} cells will take about {amount(tasks)}, {estimated.jobs} at a time"
    if estimated.after:
        between = estimated.of(tasks) - estimated.before - estimated.after
        text += (
            f" ({duration(estimated.before)} until they start, {duration(between)} of training and diagnosis, "
            f"{duration(estimated.after)} of DVC and the report; {estimated.timed})"
        )
    if len(kept) == len(tasks):
        return text
    left = {task.key for task in tasks} - {task.key for task in kept}
    seeds = sorted({estimated.cells[key]["seed"] for key in left})
    return (
        f"{text}; {_what_limits(budget)} has room for {count - len(left)} of them, about {amount(kept)}. "
        f"Left out: {len(left)}, of seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    )


def duration(seconds: float) -> str:
    """Return a time such as ``40 s``, ``7.5 min`` or ``3.2 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _what_limits(budget: Budget) -> str:
    return "budget.cap" if budget.cap is not None and budget.limit != budget.seconds else "budget.seconds"


def probed(keys: Sequence[str], jobs: int, *, eager: bool = False) -> dict[str, Kind]:
    """Time a few steps of the cells ``keys`` in ``jobs`` processes at a time; return the seconds by key.

    A cell for which there was no time is missing. ``eager``: do not compile the graph of the model. Other compiled code
    is kept for the runs. Raises :class:`UserError` if a cell fails.
    """
    print(f"timing a few steps of {', '.join(keys)}{', uncompiled' * eager}", flush=True)
    command = [*PROBE, *["--eager"] * eager, *keys]
    LOGS.mkdir(parents=True, exist_ok=True)
    logs = [LOGS / f"probe-{number}.log" for number in range(jobs)]  # in one log their lines would mix
    with ExitStack() as files:
        streams = [files.enter_context(open(log, "wb")) for log in logs]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream) for stream in streams]
        try:
            answers = [process.communicate()[0] for process in processes]
        except KeyboardInterrupt:  # the signal may not have reached the processes and their compilers
            stop_children()
            raise
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            lines = log.read_text(errors="replace").replace("\r", "\n").strip().split("\n")
            raise UserError(f"no estimate could be made: {lines[-1].removeprefix('error: ')} (all of it is in {log})")
    probes = [{part["key"]: part for part in map(json.loads, answer.splitlines())} for answer in answers]
    measured = {key: [probe[key] for probe in probes if key in probe] for key in keys}
    kinds = {key: Kind.of(parts) for key, parts in measured.items() if parts}
    return {key: replace(kind, load=min(kind.load, COMPILES)) for key, kind in kinds.items()}  # compiled by now


def record_of(name: str, folder: Path = RECORDS) -> Record:
    """Return the record (by `make gpu`) of the GPU whose name contains ``name``; case does not matter.

    Raises :class:`UserError` unless exactly one does and its record has ``parts_of_runs``, the seconds of runs.
    """
    records = {record["device"]: record for record in map(read_json, sorted(folder.glob("gpu_*.json")))}
    named = [device for device in records if name.lower() in device.lower()]
    if len(named) != 1:
        known = ", ".join(records) or f"none; `make gpu` writes one on a machine with a GPU, to {folder}"
        raise UserError(f"GPU={name}: {'more than one GPU is' if named else 'no GPU is'} named so; measured: {known}")
    if not records[named[0]].get("parts_of_runs"):
        raise UserError(f"GPU={name}: the record of {named[0]} has no seconds of runs yet; `make gpu` there goes on")
    return records[named[0]]


def estimate_on(record: Record, tasks: Sequence[Task]) -> Estimate:
    """Return the estimate for ``tasks``, one at a time, on the GPU of ``record``.

    Raises :class:`UserError` for a model and batch that the record does not have.
    """

    def known(cells: dict[str, Settings]) -> dict[str, Kind]:
        return {key: Kind.of([row_of(key, cell)]) for key, cell in cells.items()}

    def row_of(key: str, cell: Settings) -> dict[str, float]:
        batch = cell["train"]["batch"] * cell["train"]["grad_accumulation"]
        for row in record["parts_of_runs"]:
            if row["batch"] == batch and row["sizes"].items() <= cell["model"].items():
                return row
        has = ", ".join(f"{row['name']} (batch {row['batch']})" for row in record["parts_of_runs"])
        raise UserError(f"{record['device']} was not measured with the model and batch of {key}; it was: {has}")

    return estimate(tasks, 1, known)


def sizes_table(record: Record, budget: Budget) -> str:
    """Return a table, as text: the time and cost of a run of each model size that ``record`` has."""
    price = budget.price or PRICE
    last = record["sessions"][max(record["sessions"], key=int)]
    source = f"torch {last['torch']}, commit {(last['commit'] or 'unknown')[:10]}"
    what = f"{record['parts_of_runs'][0]['format']}, {TOKENS_A_PARAMETER} tokens a parameter, at {price:.2f} an hour"
    lines = [
        f"{record['device']} ({source}), {what}:",
        f"{'model':<10}{'parameters':>12}{'tokens/s':>12}{'a run':>10}{'costs':>10}{f'{RUNS} runs':>10}",
    ]
    for row in record["parts_of_runs"]:
        seconds = TOKENS_A_PARAMETER * row["parameters"] / row["tokens_per_s"]
        cost, size = price * seconds / 3600, f"{row['parameters'] / 1e6:.3g} M"
        lines.append(
            f"{row['name']:<10}{size:>12}{row['tokens_per_s']:>12,}{duration(seconds):>10}{cost:>10.2f}"
            f"{RUNS * cost:>10.2f}"
        )
    return "\n".join(lines)
