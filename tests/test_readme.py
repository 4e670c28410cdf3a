"""The examples of the READMEs give what they say they give."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EVERY = [ROOT / "README.md", *sorted(ROOT.glob("altgrad/*/README.md"))]
READMES = [path for path in EVERY if "```pycon" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_is_true(path: Path):
    examples = re.findall(r"^```pycon\n(.*?)^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert examples
    # One session, as a reader would type it.
    test = doctest.DocTestParser().get_doctest("\n".join(examples), {}, path.name, str(path), 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
