"""A corpus of docstrings. Oracles: packages written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from altgrad.config import UserError
from altgrad.config.schema import LocalCorpus
from altgrad.data import documents
from altgrad.data.corpora import SPLITS
from altgrad.data.docstrings import docstrings, main, write_docstrings

LONG = "This sentence stands in a docstring and is no code. " * 12


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    root = tmp_path / "lib" / "documented"
    (root / "inner" / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text(f'"""{LONG}"""\nraise RuntimeError("nobody imports this")\n')
    (root / "inner" / "again.py").write_text(f'"""{LONG}"""\n')
    (root / "inner" / "own.py").write_text(f'def f():\n    """Own. {LONG}"""\n')
    (root / "inner" / "short.py").write_text('"""Too little."""\n')
    (root / "inner" / "broken.py").write_text(f'"""{LONG} broken"""\ndef (:\n')
    (root / "inner" / "tests" / "test_own.py").write_text(f'"""Test. {LONG}"""\n')
    monkeypatch.syspath_prepend(root.parent)
    return root.name


def test_they_come_from_top_to_bottom_without_their_indentation() -> None:
    source = '''"""Module."""
class A:
    """Class.

    Level.
        Further in.
    """
    async def f(self):
        r"""Method \\d."""
def g(): "One line."
def silent(): return """no docstring"""
'''
    assert list(docstrings(source)) == ["Module.", "Class.\n\nLevel.\n    Further in.", "Method \\d.", "One line."]


def test_a_module_is_a_text_and_what_was_shown_is_not_shown_again(package: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    assert write_docstrings(folder, [package]) == 2
    texts = {path.name: path.read_text().strip() for path in folder.iterdir()}
    assert texts == {"documented.__init__.txt": LONG.strip(), "documented.inner.own.txt": f"Own. {LONG}".strip()}
    corpus = LocalCorpus(source="local", path=str(folder), min_characters=1)
    assert sorted(text for split in SPLITS for text in documents(corpus, split)) == sorted(texts.values())


def test_what_is_in_the_way_is_said_before_anything_is_written(package: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no_such_package is no package that is installed here"):
        write_docstrings(tmp_path / "texts", [package, "no_such_package"])
    assert not (tmp_path / "texts").exists()
    with pytest.raises(UserError, match="is not empty"):
        write_docstrings(tmp_path, [package])


@pytest.mark.parametrize(("given", "status"), [(["folder"], 2), (["--help"], 0)])
def test_the_command_says_how_it_is_used(given: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=str(status)):
        main(given)
    said = "".join(capsys.readouterr())
    assert "usage: python -m altgrad.data.docstrings [-h] folder packages [packages ...]" in said
