"""The record of one machine: parts that were measured in sessions of their own, in one file.

``sessions`` holds the command, commit and versions of each session by its number, and every result
names its ``session``. A result replaces the one that it repeats and leaves the others alone, whatever
session they are from; sessions that nothing refers to any more are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from altgrad.common.files import read_json
from altgrad.common.provenance import write_record

BASELINE = "bf16"  # the contestant that all others are timed beside
MACHINE = ("device", "on_gpu", "threads", "processor", "vector_instructions")  # what tells a machine
SAME = ("commit", "torch", "driver", "triton")  # of two sessions whose results need not be measured again
IDENTITY = ("model", "batch", "elements", "name")  # what two results of a part share if one repeats the other


def load_benches(folder: Path) -> list[dict[str, Any]]:
    """Return the records in ``folder``, one per machine."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


class Record:
    """The file of one machine, written anew with each result; what it holds already stays.

    ``found`` has what tells the machine (`MACHINE`), and what tells this session: command, commit and versions.
    """

    def __init__(self, path: Path, found: Mapping[str, Any]) -> None:
        self.path = path
        self.content = read_json(path) if path.exists() else {"sessions": {}}
        self.content |= {key: found[key] for key in MACHINE if key in found}
        self._number = str(1 + max((int(number) for number in self.content["sessions"]), default=0))
        self._session = {key: value for key, value in found.items() if key not in MACHINE}

    def put_limits(self, limits: Mapping[str, float]) -> None:
        """Replace the limits of the machine and write."""
        self.content["limits"] = {**limits, "session": self._number}
        self._write()

    def put(self, part: str, results: list[dict[str, Any]]) -> None:
        """Replace the results of ``part`` that ``results`` repeat and write."""
        new = {_identity(result) for result in results}
        kept = [result for result in self.content.get(part, []) if _identity(result) not in new]
        self.content[part] = kept + [{**result, "session": self._number} for result in results]
        self._write()

    def put_item(self, name: str, took_s: float, failed: str | None = None) -> None:
        found = {"took_s": round(took_s, 1), "failed": failed, "session": self._number}
        self.content["items"] = self.content.get("items", {}) | {name: found}
        self._write()

    def has(self, name: str) -> bool:
        """Whether an item was measured, by a session of the same commit and versions."""
        item = self.content.get("items", {}).get(name)
        if item is None or item["failed"] is not None:
            return False
        session = self.content["sessions"][item["session"]]
        return all(session.get(key) == self._session.get(key) for key in SAME)

    def _write(self) -> None:
        parts = [part for part in self.content.values() if isinstance(part, list)]
        results = [*(result for part in parts for result in part), *self.content.get("items", {}).values()]
        used = {result["session"] for result in [*results, self.content.get("limits", {})] if result}
        sessions = self.content["sessions"] | {self._number: self._session}
        self.content["sessions"] = {number: sessions[number] for number in sessions if number in used}
        write_record(self.path, self.content)


def _identity(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result.get(key) for key in IDENTITY)
