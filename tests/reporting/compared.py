"""A table of runs as a file, and what the command makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from altgrad import compare as command


def table(path: Path, rows: Iterable[tuple[str, str, int, float]]) -> Path:
    """Write final losses, given as configuration, optimizer, seed and loss."""
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["configuration,optimizer,seed,loss", *lines]) + "\n")
    return path


def report(results: Path, *arguments: object) -> str:
    """Return the page that ``altgrad compare`` writes beside ``results``."""
    out = results.parent / "out"
    command.main([str(results), *map(str, arguments), "-o", str(out)])
    return (out / "REPORT.md").read_text(encoding="utf-8")


def rows_of(page: str, lead: str) -> list[list[str]]:
    """Return the rows of the first table after ``lead``, without its head."""
    lines = page.split(lead, 1)[1].split("\n\n")
    found = next(block for block in lines if block.startswith("|")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[2:]]
