"""The pages of the packages: each file of a package is in its table, and what a page names is there.

Oracle: the files of this checkout.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import altgrad

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in (ROOT / "altgrad").glob("*/__init__.py"))
PAGES = sorted((ROOT / "altgrad").rglob("*.md"))
READMES = [package / "README.md" for package in PACKAGES]
SOURCES = (".py", ".cpp", ".h", ".j2", ".html", ".css", ".js")
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
SOURCE = re.compile(r"`([\w./]+\.(?:py|cpp|h|j2|html|css|js))`")


def identity(path: Path) -> str:
    return path.relative_to(ROOT / "altgrad").as_posix()


def in_the_table(page: Path) -> set[str]:
    """Return the files in the first column of the tables of a page."""
    rows = re.findall(r"^\| (`.*?`) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for row in rows for name in SOURCE.findall(row)}


def named(page: Path) -> set[str]:
    """Return the files in the table, by their paths, and those that a row on a folder (`cpu/`) names."""
    rows = re.findall(r"^\| `(\w+/)` \| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return in_the_table(page) | {folder + name for folder, text in rows for name in SOURCE.findall(text)}


def test_every_package_has_a_page() -> None:
    assert [page for page in READMES if not page.is_file()] == []


@pytest.mark.parametrize("page", READMES, ids=identity)
def test_the_table_has_every_file_of_the_package_and_no_other(page: Path) -> None:
    files = {path.relative_to(page.parent).as_posix() for path in page.parent.rglob("*.*") if path.suffix in SOURCES}
    assert {file for file in named(page) ^ files if not file.endswith("__init__.py")} == set()


@pytest.mark.parametrize("page", READMES, ids=identity)
def test_a_page_says_what_the_package_is_for_its_names_its_files_and_how_to_add_to_it(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith(f"# altgrad/{page.parent.name}: ")
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:2] == ["## Names", "## Files"]
    prose = re.sub(r"^```\w+\n.*?^```$", "", "\n".join(lines), flags=re.DOTALL | re.MULTILINE)
    assert "How to add" in prose or page.parent.name == "metrics"  # which says where each kind is added
    assert 30 <= len(prose.splitlines()) <= 90


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link
    for name in re.findall(r"`((?:altgrad|tests|stages|reports)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for target in re.findall(r"`make ([\w-]+)", text):
        assert target in TARGETS, target
    for name in re.findall(r"`altgrad\.([a-z_.]+)`", text):
        path = ROOT / "altgrad" / name.replace(".", "/")
        assert path.exists() or path.with_suffix(".py").exists() or hasattr(altgrad, name), name


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_a_page_fits_the_width(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []
