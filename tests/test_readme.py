"""The README's examples give what it says they give."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_every_example_is_true():
    examples = re.findall(r"^```pycon\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert examples
    # One session, as a reader would type it.
    test = doctest.DocTestParser().get_doctest("\n".join(examples), {}, "README.md", str(README), 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append, clear_globs=False)
    assert not report, "".join(report)
