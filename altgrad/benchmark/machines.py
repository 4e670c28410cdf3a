"""The records of `make bench`: one file per machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altgrad.config.files import read_json

MACHINE = ("device", "on_gpu", "threads", "processor", "vector_instructions")
#: What is measured, in the order in which it is, and its name in words.
PARTS = {
    "limits": "the machine's limits",
    "steps": "step times",
    "memory": "peak memory",
    "compile": "compile time",
    "optimizers": "steps of the optimizer arms",
    "quantizers": "quantizers beside their peers",
    "study": "cells an hour",
}


def load_benches(folder: Path) -> list[dict[str, Any]]:
    """Return the records in ``folder``, one per machine."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def sizes(results: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the models and batches of results: narrow models first, where results say how wide, and small batches."""
    models = {result["model"]: result.get("width", 0) for result in results}
    rank = {model: i for i, model in enumerate(sorted(models, key=models.__getitem__))}
    found = {(result["model"], result["batch"]) for result in results}
    return sorted(found, key=lambda size: (rank[size[0]], size[1]))


def picture_name(bench: dict[str, Any]) -> str:
    """Return the name of the machine's figure: letters, digits and underscores."""
    letters = "".join(c if c.isalnum() else " " for c in f"{bench['device']} {bench['threads']} threads".lower())
    return "_".join(["step_times", *letters.split()])


def commands(bench: dict[str, Any], *parts: str) -> list[tuple[str, str | None]]:
    """Return the commands and commits that measured ``parts``, in the order of their sessions."""
    results: list[dict[str, Any]] = []
    for part in parts:
        found = bench.get(part, [])
        results += [found] if isinstance(found, dict) else found
    numbers = sorted({result["session"] for result in results}, key=int)
    sessions = [bench["sessions"][number] for number in numbers]
    return [(session["command"], session.get("commit")) for session in sessions]
