"""The report as one HTML file that needs nothing else: styles inline, figures inside it.

The layout is a Jinja template (``page.html.j2``) because it escapes what it is given: a format, an
arm or an error message may hold any character. Figures are PNG rather than SVG, because a drawing's
size then does not grow with the length of a run or the depth of a model; the SVG files lie beside
the page.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from altgrad.reporting.document import Document

MARKS = re.compile(r"(`[^`]+`|\*\*.+?\*\*)")


def to_html(document: Document, figures: Path) -> str:
    """Return the document as a page; the PNG files of its pictures are read from ``figures``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("altgrad.reporting", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["marks"] = marks
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["embed"] = lambda name: _embed(figures / f"{name}.png")
    return environment.get_template("page.html.j2").render(document=document)


def marks(text: str) -> Markup:
    """Return ``text`` escaped, with ``**strong**`` and `` `code` `` as elements."""
    pieces = []
    for piece in MARKS.split(text):
        if len(piece) > 2 and piece[0] == piece[-1] == "`":
            pieces.append(Markup("<code>{}</code>").format(piece[1:-1]))
        elif len(piece) > 4 and piece.startswith("**"):
            pieces.append(Markup("<strong>{}</strong>").format(marks(piece[2:-2])))
        else:
            pieces.append(escape(piece))
    return Markup("").join(pieces)


def _embed(path: Path) -> str:
    """Return a PNG file as a ``data:`` address."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
