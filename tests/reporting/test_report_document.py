"""Markdown and HTML show the same content and let no name break out of it. Oracle: html.parser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from altgrad.reporting.document import Column, Document, Picture, Section, Table, Text
from altgrad.reporting.html import marks, to_html
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.wording import joined, number, plural, signed, significant, whole

HOSTILE = "<script>alert(1)</script> a|b [x](y) spacing_unmatched *z* & \"q\" 'p'"


class Reader(HTMLParser):
    """Collects tags, attributes and visible text, and checks that tags close in order."""

    VOID = {"meta", "img", "link", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


@pytest.fixture
def document(tmp_path: Path) -> Document:
    (tmp_path / "plot.png").write_bytes(b"\x89PNG made up")
    blocks = [
        Text(f"**bold** and `code_with_marks` and {HOSTILE}"),
        Text(HOSTILE),
        Table([Column("name", numeric=False), Column("n")], [[HOSTILE, "1"], ["`E4M3`", "−2"]], note="note"),
        Picture("plot", "what it shows", "caption"),
    ]
    return Document("Title", "Question?", [Text("answer")], [Section("Part", "part", blocks)])


def test_html_closes_its_tags_and_shows_every_name_as_text(document: Document, tmp_path: Path) -> None:
    page = Reader(to_html(document, tmp_path))
    assert page.text.count(HOSTILE) == 3
    assert [tag for tag, _ in page.tags].count("script") == 1, "the page's own"
    assert ("strong", {}) in page.tags and ("code", {}) in page.tags


def test_html_embeds_the_figure_with_its_text(document: Document, tmp_path: Path) -> None:
    images = [attrs for tag, attrs in Reader(to_html(document, tmp_path)).tags if tag == "img"]
    assert [image["alt"] for image in images] == ["what it shows"]
    assert images[0]["src"].startswith("data:image/png;base64,")


def test_contents_lead_to_every_section(document: Document, tmp_path: Path) -> None:
    tags = Reader(to_html(document, tmp_path)).tags
    anchors = {attrs["href"][1:] for tag, attrs in tags if tag == "a" and attrs["href"][0] == "#"}
    assert anchors == {attrs["id"] for tag, attrs in tags if tag == "h2"} == {"part"}


def test_markdown_tables_keep_their_columns(document: Document) -> None:
    rows = [line for line in to_markdown(document).splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {4}


def test_markdown_escapes_what_would_be_a_mark(document: Document) -> None:
    text = to_markdown(document)
    assert r"spacing\_unmatched \*z\*" in text and "<script>" not in text
    assert "**bold**" in text and "`code_with_marks`" in text
    assert "![what it shows](figures/plot.png)" in text


def test_a_table_refuses_a_row_of_another_length() -> None:
    with pytest.raises(ValueError, match="3 cells in a table of 2 columns"):
        Table([Column("a"), Column("b")], [["1", "2", "3"]])


def test_marks_are_escaped_inside_code_and_strong() -> None:
    assert str(marks("**a `<b>`** &")) == "<strong>a <code>&lt;b&gt;</code></strong> &amp;"
    assert str(marks("([why](../a/B.md))")) == '(<a href="../a/B.md">why</a>)'
    assert "<a" not in marks("[+0.1, +0.2](x) [a](javascript:b.md) [a](http://b.md)")


def test_numbers_look_alike_everywhere() -> None:
    assert [signed(x, 3) for x in (0.01234, -0.01234, 0.0, -1e-9, float("nan"), None)] == [
        "+0.012", "−0.012", "0.000", "0.000", "–", "–",
    ]  # fmt: skip
    assert [number(-1.25, 1), significant(6.1035e-05), significant(57344, 6)] == ["−1.2", "6.1e−05", "57344"]
    assert [whole(3_360_000), whole(None), whole(12)] == ["3\u202f360\u202f000", "–", "12"]
    assert [plural(1, "seed"), plural(2, "seed"), joined(["a"]), joined(["a", "b", "c"]), joined([])] == [
        "1 seed", "2 seeds", "a", "a, b and c", "",
    ]  # fmt: skip
