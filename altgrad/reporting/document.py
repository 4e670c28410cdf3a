"""The report as content: a tree of a few kinds of blocks, written once and rendered to Markdown and to HTML.

Text in any block is plain but for three marks that both renderings know: ``**strong**``,
`` `code` `` and ``[word](page.md)``. Everything else is shown as it is, so a format or a path may hold any character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Which cells of the grid a number is of: their ``format``, ``optimizer``, ``lr_scale`` and ``seed``, as far as they
#: are told, each one value or several; and which ``metric`` of their diagnoses. Empty: all cells.
Behind = Mapping[str, object]
Row = tuple[Sequence[str], Behind | list[Any]]  # of a table, with what is behind all of it or each cell


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Column:
    """A table's column: its head and whether it holds numbers (set right, in figures of one width)."""

    head: str
    numeric: bool = True


def words(head: str) -> Column:
    """A column of text."""
    return Column(head, numeric=False)


@dataclass(frozen=True)
class Table:
    """A table of strings; every row has as many cells as there are columns.

    ``behind`` is empty, or has for each cell of each row which cells of the grid its number is of; None where it is of
    none.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""
    behind: Sequence[Sequence[Behind | None]] = ()

    def __post_init__(self) -> None:
        if self.behind and [len(row) for row in self.behind] != [len(row) for row in self.rows]:
            raise ValueError(f"the cells behind numbers do not fit the {len(self.rows)} rows")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Row], note: str = "") -> Table | None:
        """Return the table of rows with the cells of the grid behind each, ``None`` without a row.

        They are given for each cell of the row, or once: then they are behind every number of it.
        """

        def of_row(behind: Behind | list[Any]) -> list[Any]:
            return behind if isinstance(behind, list) else [behind if column.numeric else None for column in columns]

        return cls(columns, [row for row, _ in rows], note, [of_row(behind) for _, behind in rows]) if rows else None


@dataclass(frozen=True)
class Picture:
    """A figure by the name of its files, with the text that stands for it and what to read from it.

    ``behind`` says which cells of the grid it shows; None where it shows none.
    """

    name: str
    alt: str
    caption: str
    behind: Behind | None = None


@dataclass(frozen=True)
class Section:
    """A titled part of the report; ``anchor`` is its address on the page."""

    title: str
    anchor: str
    blocks: Sequence[Block] = field(default_factory=list)


Block = Text | Table | Picture


def there(*blocks: Block | None) -> list[Block]:
    """Return those of ``blocks`` that are there."""
    return [block for block in blocks if block is not None]


@dataclass(frozen=True)
class Document:
    """The whole report: a title, the question, the answer, and the sections that carry it."""

    title: str
    question: str
    answer: Sequence[Block]
    sections: Sequence[Section]
