"""Reports as Markdown, written once: REPORT.md is this text, and `altgrad.reporting.html` renders it as a page.

A block is a `Table`, a `Picture`, or a paragraph: a string with three marks, ``**strong**``, `` `code` `` and
``[word](page.md)``. Numbers look the same in every report.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

NONE = "–"
MINUS = "−"
NAMED = re.compile(r"(`|\*\*)([^`]+?)\1")


@dataclass(frozen=True)
class Column:
    """A table's column: its head, and whether it holds numbers, which are aligned right."""

    head: str
    numeric: bool = True


def words(head: str) -> Column:
    """Return a column of text."""
    return Column(head, numeric=False)


@dataclass(frozen=True)
class Table:
    """A table of texts, each row with a text per column, and a note below it."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        heads = [column.head for column in self.columns]
        rules = ["---:" if column.numeric else ":---" for column in self.columns]
        rows = [[escaped(value).replace("|", r"\|").replace("\n", " ") for value in row] for row in [heads, *self.rows]]
        text = "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rules, *rows[1:]])
        return f"{text}\n\n*{escaped(self.note)}*" if self.note else text


@dataclass(frozen=True)
class Picture:
    """A figure: the name of its files, its alternative text and its caption."""

    name: str
    alt: str
    caption: str

    def __str__(self) -> str:
        alt = self.alt.replace("]", ")").replace("[", "(")
        return f"![{alt}](figures/{self.name}.png)\n\n*{escaped(self.caption)}*"


Block = str | Table | Picture


def to_markdown(blocks: Iterable[Block | None]) -> str:
    """Return the blocks as GitHub's Markdown, without those that are ``None``; figures are ``figures/<name>.png``."""
    return "\n\n".join(escaped(block) if isinstance(block, str) else str(block) for block in blocks if block)


def escaped(text: str) -> str:
    """Return ``text`` with ``_``, ``<`` and single ``*`` escaped, as in ``E4M3*``.

    ``**strong**`` text keeps its marks, and code between back-ticks stays as it is.
    """
    pieces = text.split("`")
    for position in range(0, len(pieces), 2):  # what stands between back-ticks is left as it is
        plain = pieces[position].replace("_", r"\_").replace("<", "&lt;")
        pieces[position] = "**".join(part.replace("*", r"\*") for part in plain.split("**"))
    return "`".join(pieces)


def named_runs(text: str, links: Mapping[str, str]) -> str:
    """Return Markdown in which each strong or code text that is a key of ``links`` becomes a link to that address."""

    def linked(found: re.Match[str]) -> str:
        target = links.get(found[2].replace("\\", ""))
        return f"[{found[0]}]({target})" if target else found[0]

    return NAMED.sub(linked, text)


def shown(value: float | None) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number."""
    return value is not None and math.isfinite(value)


def as_json(value: float | None, digits: int = 12) -> float | None:
    """Return ``value`` rounded for JSON, or None if not finite; twelve digits hide effects of summation order."""
    return float(f"{value:.{digits}g}") + 0.0 if shown(value) else None


def number(value: float | None, digits: int) -> str:
    """Return ``value`` with ``digits`` decimals, or a dash if it is not finite."""
    return f"{value:.{digits}f}".replace("-", MINUS) if shown(value) else NONE


def signed(value: float | None, digits: int) -> str:
    """Return ``value`` with its sign and ``digits`` decimals; zero after rounding has no sign."""
    if not shown(value):
        return NONE
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", MINUS)


def significant(value: float | None, digits: int = 3) -> str:
    """Return ``value`` with ``digits`` significant digits, as ``1.5e−07`` if very small or large; a dash for none."""
    return f"{value:.{digits}g}".replace("-", MINUS) if shown(value) else NONE


def integer(value: float | None) -> str:
    """Return a count with thin spaces between thousands."""
    return f"{int(value):,}".replace(",", "\u202f") if shown(value) else NONE


def plural(count: int, noun: str) -> str:
    """Return ``1 seed`` or ``2 seeds``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Return the names as ``a, b and c``."""
    *first, last = [*names] or [""]
    return f"{', '.join(first)} and {last}" if first else last
