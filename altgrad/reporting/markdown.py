"""The report as GitHub-flavoured Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from altgrad.reporting.document import Block, Document, Picture, Table, Text


def to_markdown(document: Document) -> str:
    """Return the document as Markdown; figures are linked as ``figures/<name>.png``."""
    parts = [f"# {document.title}", f"**{document.question}**", *map(_block, document.answer)]
    for section in document.sections:
        parts += [f"## {section.title}", *map(_block, section.blocks)]
    return "\n\n".join(parts) + "\n"


def blocks_to_markdown(blocks: Sequence[Block]) -> str:
    """Return blocks that stand on a page of another kind."""
    return "\n\n".join(map(_block, blocks))


def _block(block: Block) -> str:
    match block:
        case Text(text):
            return text_to_markdown(text)
        case Table():
            return _table(block)
        case Picture(name, alt, caption):
            return f"![{alt.replace(']', ')').replace('[', '(')}](figures/{name}.png)\n\n*{text_to_markdown(caption)}*"


def text_to_markdown(text: str) -> str:
    """Return ``text`` with the characters escaped that Markdown would take for marks of its own.

    Names such as ``spacing_unmatched`` and ``E4M3*`` are common here; the two marks of the document stay.
    """
    pieces = text.split("`")
    for position in range(0, len(pieces), 2):  # what stands between back-ticks is left as it is
        plain = pieces[position].replace("_", r"\_").replace("<", "&lt;")
        pieces[position] = "**".join(part.replace("*", r"\*") for part in plain.split("**"))
    return "`".join(pieces)


def _table(table: Table) -> str:
    heads = [_cell(column.head) for column in table.columns]
    rules = ["---:" if column.numeric else ":---" for column in table.columns]
    lines = [heads, rules, *([_cell(value) for value in row] for row in table.rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{text}\n\n*{text_to_markdown(table.note)}*" if table.note else text


def _cell(value: str) -> str:
    return text_to_markdown(value).replace("|", r"\|").replace("\n", " ")
