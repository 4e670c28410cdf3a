"""What runs take on a GPU that is not at hand, or was measured before: read from the records of `make gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from altgrad.config import UserError
from altgrad.config.files import read_json
from altgrad.config.schema import Budget
from altgrad.execution.budget import Estimate, Kind, duration, estimate, probed
from altgrad.execution.executor import Task

RECORDS = Path("reports/bench")
PRICE = 2.5  # US dollars of an hour of an H100, in 2026; `budget.price` is another
TOKENS_A_PARAMETER, RUNS = 20, 10

Record = dict[str, Any]


def record_of(name: str, folder: Path = RECORDS) -> Record:
    """Return the record of the GPU whose name has ``name`` in it, whatever its case.

    Raises :class:`UserError` if there is not one such, or it has no run that was taken apart.
    """
    found = {record["device"]: record for path in sorted(folder.glob("gpu_*.json")) if (record := read_json(path))}
    named = [device for device in found if name.lower() in device.lower()]
    if len(named) != 1:
        known = ", ".join(found) or f"none; `make gpu` writes one on a machine with a GPU, to {folder}"
        raise UserError(f"GPU={name}: {'more than one GPU is' if named else 'no GPU is'} named so; measured: {known}")
    if not found[named[0]].get("parts_of_runs"):
        raise UserError(f"GPU={name}: the record of {named[0]} has no seconds of runs yet; `make gpu` there goes on")
    return found[named[0]]


def row_of(record: Record, cell: dict[str, Any]) -> dict[str, float] | None:
    """Return what a run of the model and batch of ``cell`` was made of, None if none of them was measured."""
    batch = cell["train"]["batch"] * cell["train"]["grad_accumulation"]
    rows = record.get("parts_of_runs", [])
    return next((row for row in rows if row["batch"] == batch and row["sizes"].items() <= cell["model"].items()), None)


def record_here(device: str | None, folder: Path = RECORDS) -> Record | None:
    """Return the record of the GPU called ``device``, None if there is none."""
    records = map(read_json, folder.glob("gpu_*.json"))
    return next((record for record in records if record["device"] == device and record.get("parts_of_runs")), None)


def estimate_on(record: Record, tasks: Sequence[Task], jobs: int | None = None) -> Estimate:
    """Return what ``tasks`` will take on the GPU of ``record``, by the models that it has.

    ``jobs`` at a time on this machine, where a few steps of other models are timed; without it one at a time there,
    with :class:`UserError` for a model that the record does not have.
    """

    def known(cells: dict[str, dict[str, Any]]) -> dict[str, Kind]:
        rows = {key: row for key, cell in cells.items() if (row := row_of(record, cell))}
        others = [key for key in cells if key not in rows]
        if others and jobs is None:
            has = ", ".join(f"{row['name']} (batch {row['batch']})" for row in record["parts_of_runs"])
            asked = f"the model and batch of {others[0]}"
            raise UserError(f"{record['device']} was not measured with {asked}; it was: {has}")
        timed = probed(others, jobs) if others and jobs else {}
        return {key: Kind.of([row]) for key, row in rows.items()} | timed

    return estimate(tasks, jobs or 1, known)


def sizes_table(record: Record, budget: Budget) -> str:
    """Return what runs of each measured model size take and cost on the GPU, as lines for the terminal."""
    price = budget.price or PRICE
    last = record["sessions"][max(record["sessions"], key=int)]
    first = record["parts_of_runs"][0]
    source = f"torch {last['torch']}, commit {(last['commit'] or 'unknown')[:10]}"
    what = f"{first['format']}, {TOKENS_A_PARAMETER} tokens a parameter, at {price:.2f} an hour"
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
