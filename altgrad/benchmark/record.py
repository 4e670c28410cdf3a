"""The record of one machine: parts that were measured in sessions of their own, in one file.

``sessions`` holds the command, commit and versions of each session by its number, and every result
names its ``session``. A result replaces the one that it repeats and leaves the others alone, whatever
session they are from; sessions that nothing refers to any more are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from altgrad.config.files import read_json
from altgrad.numerics.check.records import write_record

SAME = ("commit", "torch", "driver", "triton")  # of two sessions whose results need not be measured again

#: The keys that tell which results of a part a new measurement replaces: those measured together, or a ratio would join
#: two sessions.
GROUPS: dict[str, tuple[str, ...]] = {
    "checks": (), "operands": ("elements",), "steps": ("model", "batch"), "memory": ("model", "batch"),
    "compile": ("model",), "at_once": ("model",), "parts_of_runs": (), "optimizers": ("model", "name"),
    "quantizers": ("elements",), "study": ("model",),
}  # fmt: skip


class Record:
    """The file of one machine, written anew with each result.

    Args:
        path: the file; what it holds already stays.
        machine: what tells the machine: ``device``, ``on_gpu``, ``threads``, ``processor``.
        session: what tells this session: ``command``, ``commit`` and versions.
    """

    def __init__(self, path: Path, machine: dict[str, Any], session: dict[str, Any]) -> None:
        self.path = path
        self.content = read_json(path) if path.exists() else {"sessions": {}}
        self.content |= machine
        self._number = str(1 + max((int(number) for number in self.content["sessions"]), default=0))
        self._session = session

    def put_limits(self, limits: Mapping[str, float]) -> None:
        """Replace the limits of the machine and write."""
        self.content["limits"] = {**limits, "session": self._number}
        self._write()

    def put(self, part: str, results: list[dict[str, Any]], *, each: bool = False) -> None:
        """Replace the results of ``part`` that are of the same groups as ``results`` and write.

        With ``each``, only those of the same names: results that were measured beside the baseline one by one.
        """
        keys = dict.fromkeys([*GROUPS[part], *(["name"] if each else [])])

        def group(result: dict[str, Any]) -> tuple[Any, ...]:
            return tuple(result[key] for key in keys)

        new = {group(result) for result in results}
        kept = [result for result in self.content.get(part, []) if group(result) not in new]
        self.content[part] = kept + [{**result, "session": self._number} for result in results]
        self._write()

    def put_item(self, name: str, took_s: float, failed: str | None = None) -> None:
        """Write down that an item of a list was measured, or why it was not."""
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
        results = [result for part in GROUPS for result in self.content.get(part, [])]
        results += self.content.get("items", {}).values()
        used = {result["session"] for result in [*results, self.content.get("limits", {})] if result}
        sessions = self.content["sessions"] | {self._number: self._session}
        self.content["sessions"] = {number: sessions[number] for number in sessions if number in used}
        write_record(self.path, self.content)
