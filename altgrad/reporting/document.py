"""The report as content: a tree of a few kinds of blocks, written once and rendered to Markdown and to HTML.

Text in any block is plain but for two marks that both renderings know: ``**strong**`` and
`` `code` ``. Everything else is shown as it is, so a format or a path may hold any character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Behind = Mapping[str, object]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Column:
    """A table's column: its head and whether it holds numbers (set right, in figures of one width)."""

    head: str
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """A table of strings; every row has as many cells as there are columns.

    ``behind`` is empty, or has for each row which cells of the grid its numbers are of: their ``format``,
    ``optimizer`` and ``lr_scale``, as far as these are told, each one value or several.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""
    behind: Sequence[Behind] = ()

    def __post_init__(self) -> None:
        if self.behind and len(self.behind) != len(self.rows):
            raise ValueError(f"cells behind {len(self.behind)} rows, of {len(self.rows)}")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")


@dataclass(frozen=True)
class Picture:
    """A figure by the name of its files, with the text that stands for it and what to read from it."""

    name: str
    alt: str
    caption: str


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks behind a summary line, closed until opened."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """A titled part of the report; ``anchor`` is its address on the page."""

    title: str
    anchor: str
    blocks: Sequence[Block] = field(default_factory=list)


Block = Text | Bullets | Table | Picture | Code | Fold


@dataclass(frozen=True)
class Document:
    """The whole report: a title, the question, the answer, and the sections that carry it."""

    title: str
    question: str
    answer: Sequence[Block]
    sections: Sequence[Section]
