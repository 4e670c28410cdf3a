"""The report as one HTML file that needs nothing else: styles inline, figures inside it.

The layout is a Jinja template (``page.html.j2``) because it escapes what it is given: a format, an
arm or an error message may hold any character. Figures are PNG rather than SVG, because a drawing's
size then does not grow with the length of a run or the depth of a model; the SVG files lie beside
the page.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup, escape

from altgrad.reporting.document import Behind, Document
from altgrad.reporting.load import Study

CELLS = "cells.html"  # the page of all cells, beside the report's
MARKS = re.compile(r"(`[^`]+`|\*\*.+?\*\*|\[\w+\]\([\w./]+\.md\))")
PAGE = re.compile(r"\[(\w+)\]\(([\w./]+)\)")


def to_html(
    document: Document, figures: Path, links: Mapping[str, str] | None = None, *, cells: bool = True
) -> str:  # fmt: skip
    """Return the document as a page; the PNG files of its pictures are read from ``figures``.

    What stands in ``links``, where it is all of a strong or code text, leads to what it has there on the page of all
    cells; numbers of a table lead to the cells behind them. Without ``cells`` there is no such page.
    """
    pages = environment()
    known = links or {}
    pages.filters["marks"] = lambda text: marks(text, known)
    pages.filters["behind"] = address
    pages.filters["kind"] = lambda block: type(block).__name__

    def embed(name: str) -> str:
        png = (figures / f"{name}.png").read_bytes()
        return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"

    pages.filters["embed"] = embed
    return pages.get_template("page.html.j2").render(document=document, cells=cells)


def environment() -> jinja2.Environment:
    """Return what this package's pages are made with: templates that escape what they are given."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("altgrad.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def links_of(study: Study) -> dict[str, str]:
    """Return where on the page of all cells each cell of ``study`` is, and those of each of its entries and arms."""
    return (
        {name: address({"optimizer": name}) for name in study.optimizers}
        | {name: address({"format": name}) for name in study.formats}
        | {key: f"{CELLS}#{quote(key)}" for key in study.cells.index}
    )


def address(behind: Behind) -> str:
    """Return the address of cells: those that have for each name its value, or one of its values."""
    return f"{CELLS}#?{urlencode(behind, doseq=True)}" if behind else f"{CELLS}#"


def marks(text: str, links: Mapping[str, str] | None = None) -> Markup:
    """Return ``text`` escaped, with ``**strong**``, `` `code` `` and ``[word](page.md)`` as elements.

    Strong and code text that stands in ``links`` is a link too.
    """
    pieces, known = [], links or {}
    for piece in MARKS.split(text):
        if len(piece) > 2 and piece[0] == piece[-1] == "`":
            pieces.append(_linked(piece[1:-1], Markup("<code>{}</code>").format(piece[1:-1]), known))
        elif len(piece) > 4 and piece.startswith("**"):
            inner = _linked(piece[2:-2], marks(piece[2:-2], known), known)
            pieces.append(Markup("<strong>{}</strong>").format(inner))
        elif page := PAGE.fullmatch(piece):
            pieces.append(Markup('<a href="{}">{}</a>').format(page[2], page[1]))
        else:
            pieces.append(escape(piece))
    return Markup("").join(pieces)


def _linked(text: str, shown: Markup, links: Mapping[str, str]) -> Markup:
    if text not in links:
        return shown
    several = Markup(' class="behind"') if "#?" in links[text] else ""
    return Markup('<a{} href="{}">{}</a>').format(several, links[text], shown)
