"""The command that breaks the package on purpose tells apart what tests notice and what they do not.

Oracle: a repository of three lines, whose one test sees one of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutations.__main__ import ROOT, Mutation, mutations, report

TOY = {
    "toy.py": "def both(a, b):\n    return a + b\n\n\ndef unseen(a):\n    return a * 3\n",
    "test_toy.py": "from toy import both\n\n\ndef test_both():\n    assert both(1, 2) == 3\n",
    "pytest.ini": "[pytest]\nmarkers =\n    slow\n    long\n",
}
SEEN = Mutation("toy.py", "a + b", "a - b", "the sum is a difference", ["test_toy.py"])
UNSEEN = Mutation("toy.py", "a * 3", "a * 4", "three is four", ["test_toy.py"])
EXPLAINED = Mutation("toy.py", "a * 3", "3 * a", "the factors swap", ["test_toy.py"], "a product is the same")
BROKEN = Mutation("toy.py", "def both", "def other", "the name is gone", ["test_toy.py"])
MOVED = Mutation("toy.py", "a / b", "a", "nothing is divided", ["test_toy.py"])


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in TOY.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("todo", "expected", "good"), [
    ([SEEN, UNSEEN], ["caught", "survived"], False),
    ([SEEN, EXPLAINED], ["caught", "explained"], True),
    ([SEEN, BROKEN], ["caught", "error"], False),  # no test failed: none could be collected
])  # fmt: skip
def test_what_a_test_sees_is_caught_and_what_none_sees_survives(toy, todo, expected, good):
    lines: list[str] = []
    assert report(todo, toy, 2, lines.append) == good
    assert [line.split()[0] for line in lines[:2]] == expected
    assert all(m.file in line and m.breaks in line for m, line in zip(todo, lines, strict=False))
    assert lines[2] == f"1 {expected[0]}, 1 {expected[1]}"
    assert "test_toy.py::test_both" in lines[0]
    assert {path.name: path.read_text() for path in toy.iterdir()} == TOY, "the tree itself is never broken"


def test_a_moved_line_and_tests_that_fail_anyway_are_errors(toy):
    lines: list[str] = []
    assert not report([SEEN, MOVED], toy, 1, lines.append)
    assert len(lines) == 1 and "nothing is divided" in lines[0] and "stands there 0 times" in lines[0]
    (toy / "toy.py").write_text(TOY["toy.py"].replace("a + b", "(a + b) + 1"))
    assert not report([UNSEEN], toy, 1, lines.append)
    assert lines[1].startswith("error") and "test_toy.py::test_both fails without the mutation too" in lines[1]


def test_every_mutation_stands_where_the_table_says():
    """Move a line, and move its entry with it; the command itself takes an hour."""
    assert [f"{m.file}: {m.breaks}: {problem}" for m in mutations() if (problem := m.problem(ROOT))] == []
    assert all(m.tests and m.text != m.becomes for m in mutations())
