"""The examples of every page give what it says they give: the README's, and those of the packages."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "altgrad").rglob("*.md"))]


def examples(page: Path) -> list[str]:
    """Return the Python sessions of a page."""
    return re.findall(r"^```pycon\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def identity(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=identity)
def test_every_example_is_true(page: Path) -> None:
    # One session for each page, as a reader would type it.
    test = doctest.DocTestParser().get_doctest("\n".join(examples(page)), {}, page.name, str(page), 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def test_pages_have_examples() -> None:
    assert {"README.md", "altgrad/numerics/USE.md", "altgrad/optim/README.md"} <= {
        identity(page) for page in PAGES if examples(page)
    }
