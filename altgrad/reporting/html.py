"""The report as one HTML file that needs nothing else: styles inline, figures inside it.

The layout is a Jinja template (``page.html.j2``) because it escapes what it is given: a format, an
arm or an error message may hold any character. Figures are PNG rather than SVG, because a drawing's
size then does not grow with the length of a run or the depth of a model; the SVG files lie beside
the page.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from altgrad.reporting.document import Document

CELLS = "cells.html"  # the page of all cells, beside the report's
MARKS = re.compile(r"(`[^`]+`|\*\*.+?\*\*)")


def to_html(document: Document, figures: Path, cells: Collection[str] = ()) -> str:
    """Return the document as a page; the PNG files of its pictures are read from ``figures``.

    Where it has the key of one of ``cells`` as code, that leads to the cell on the page of all cells.
    """
    pages = environment()
    known = frozenset(cells)
    pages.filters["marks"] = lambda text: marks(text, known)
    pages.filters["kind"] = lambda block: type(block).__name__
    pages.filters["embed"] = lambda name: _embed(figures / f"{name}.png")
    return pages.get_template("page.html.j2").render(document=document)


def environment() -> jinja2.Environment:
    """Return what this room's pages are made with: templates that escape what they are given."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("altgrad.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


def marks(text: str, cells: Collection[str] = ()) -> Markup:
    """Return ``text`` escaped, with ``**strong**`` and `` `code` `` as elements, and the keys of ``cells`` as links."""
    pieces = []
    for piece in MARKS.split(text):
        if len(piece) > 2 and piece[0] == piece[-1] == "`":
            code = Markup("<code>{}</code>").format(piece[1:-1])
            linked = piece[1:-1] in cells
            pieces.append(Markup('<a href="{}#{}">{}</a>').format(CELLS, quote(piece[1:-1]), code) if linked else code)
        elif len(piece) > 4 and piece.startswith("**"):
            pieces.append(Markup("<strong>{}</strong>").format(marks(piece[2:-2], cells)))
        else:
            pieces.append(escape(piece))
    return Markup("").join(pieces)


def _embed(path: Path) -> str:
    """Return a PNG file as a ``data:`` address."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
