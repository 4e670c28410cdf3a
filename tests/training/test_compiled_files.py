"""What was compiled is used as it was made or not at all. Oracle: the bytes that were there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from altgrad.training.machine import RECORDS, recorded, remove_damaged
from tests.faults.damages import cut, flip

NAMES = "ab/kernel.so", "fxgraph/cd/entry", "ef/kernel.cpp"
BUSY = """
import sys
from pathlib import Path
from altgrad.training.machine import recorded
with recorded(Path(sys.argv[1]), Path(sys.argv[1], "made/other.json")):
    print("compiling", flush=True)
    sys.stdin.read()
"""


def compile_into(folder: Path, graph: str, *names: str) -> None:
    """Stand in for the compiler: each file's content is its name."""
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    with recorded(folder, folder / RECORDS / f"{graph}.json"):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name * 100)


def present(folder: Path) -> set[str]:
    """Return which of the files are there as they were made."""
    return {name for name in NAMES if (folder / name).exists() and (folder / name).read_text() == name * 100}


@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_goes_and_the_others_stay(tmp_path, capsys, damage, name):
    compile_into(tmp_path, "graph", *NAMES)
    remove_damaged(tmp_path)
    assert present(tmp_path) == set(NAMES) and not capsys.readouterr().err
    damage(tmp_path / name)
    remove_damaged(tmp_path)
    assert present(tmp_path) == set(NAMES) - {name} and not (tmp_path / name).exists()
    assert capsys.readouterr().err.startswith("note: 1 compiled files")


def test_a_graph_of_which_a_file_went_is_recorded_again_whole(tmp_path):
    compile_into(tmp_path, "graph", *NAMES)
    flip(tmp_path / NAMES[0])
    remove_damaged(tmp_path)
    assert not (tmp_path / RECORDS / "graph.json").exists()
    compile_into(tmp_path, "graph", NAMES[0])
    for name in NAMES:
        flip(tmp_path / name)
    remove_damaged(tmp_path)
    assert not any((tmp_path / name).exists() for name in NAMES)


def test_of_two_records_of_a_file_the_later_counts(tmp_path):
    """The first process to end may have seen half of what the second was writing."""
    (tmp_path / RECORDS).mkdir()
    with recorded(tmp_path, tmp_path / RECORDS / "second.json"):
        compile_into(tmp_path, "first", *NAMES[:2])
        (tmp_path / NAMES[0]).write_text("the whole of it")
    remove_damaged(tmp_path)
    assert (tmp_path / NAMES[0]).read_text() == "the whole of it"


def test_nothing_goes_while_another_process_compiles(tmp_path):
    compile_into(tmp_path, "graph", *NAMES)
    flip(tmp_path / NAMES[0])
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "compiling\n"
        remove_damaged(tmp_path)
        assert (tmp_path / NAMES[0]).exists()
        other.communicate("")
    remove_damaged(tmp_path)
    assert not (tmp_path / NAMES[0]).exists()


def test_a_record_that_cannot_be_read_hinders_nobody(tmp_path):
    compile_into(tmp_path, "graph", *NAMES)
    cut(tmp_path / RECORDS / "graph.json")
    remove_damaged(tmp_path)
    assert present(tmp_path) == set(NAMES)
