"""`altgrad.record` writes tables of runs, from any script and from several processes. Oracle: Python's csv."""

from __future__ import annotations

import csv
import fcntl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

import altgrad
from altgrad.reporting.external import read_rows

WRITER = """
import sys, altgrad
path, who = sys.argv[1], int(sys.argv[2])
print(flush=True)
sys.stdin.readline()  # until all are there
for i in range(200):
    altgrad.record(path, configuration="a, b", optimizer="sgd", seed=1000 * who + i % 150, loss=who + i / 256)
    altgrad.record(path, configuration="shared", optimizer="sgd", seed=i % 5, loss=who)
"""


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_several_processes_lose_no_row_and_cut_none(tmp_path):
    path = tmp_path / "results.csv"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen([*command, str(who)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for who in range(4)
    ]
    for writer in writers:
        writer.stdout.readline()
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    reads = 0
    while any(writer.poll() is None for writer in writers):
        if path.exists() and path.stat().st_size:
            reads += len(read_rows(path, "loss")) > 0  # an error if a row is cut
    assert reads > 10
    assert [writer.returncode for writer in writers] == [0] * 4
    own = {int(row["seed"]): float(row["loss"]) for row in rows(path) if row["configuration"] == "a, b"}
    # Each writes 150 seeds and 50 of them once more, with another loss.
    assert own == {1000 * who + i: who + (i + 150 if i < 50 else i) / 256 for who in range(4) for i in range(150)}
    assert len(rows(path)) == 4 * 150 + 5 and [path] == list(tmp_path.iterdir())


def test_a_reader_waits_for_a_row_that_is_being_written(tmp_path):
    path = tmp_path / "results.csv"
    altgrad.record(path, configuration="a", optimizer="sgd", seed=0, loss=1.0)
    with open(path, "a") as file, ThreadPoolExecutor() as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        print("a,sgd,1", end="", file=file, flush=True)
        reading = pool.submit(read_rows, path, "loss")
        assert not wait([reading], timeout=0.3).done
        print(",2.0", file=file, flush=True)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert list(reading.result(timeout=20)["loss"]) == [1.0, 2.0]


def test_a_run_that_is_run_again_replaces_its_row_alone(tmp_path):
    path = tmp_path / "new/results.csv"
    for seed, loss in ((1, 3.0), (11, 4.0), (1, 2.0)):
        altgrad.record(path, configuration="a", optimizer="sgd", seed=seed, loss=loss)
    assert [(row["seed"], row["loss"]) for row in rows(path)] == [("11", "4.0"), ("1", "2.0")]


def test_curves_have_a_row_per_step_and_more_columns_if_asked(tmp_path):
    path = tmp_path / "curves.csv"
    for step in (0, 10, 10):
        altgrad.record(path, configuration="a", optimizer="sgd", seed=0, step=step, loss=1.0, accuracy=0.5)
    assert [list(row.items())[3:] for row in rows(path)] == [
        [("step", step), ("loss", "1.0"), ("accuracy", "0.5")] for step in ("0", "10")
    ]


def test_a_number_comes_back_to_the_bit_and_one_that_is_not_finite_says_diverged(tmp_path):
    path = tmp_path / "results.csv"
    values = [0.1 + 0.2, np.float32(3.1), 1e-300, float("nan"), float("inf")]
    for seed, value in enumerate(values):
        altgrad.record(path, configuration="a", optimizer="sgd", seed=np.int64(seed), loss=value)
    assert [row["loss"] for row in rows(path)[3:]] == ["diverged"] * 2
    assert [float(row["loss"]) for row in rows(path)[:3]] == [float(value) for value in values[:3]]


def test_a_last_line_that_was_left_open_stays_a_line_of_its_own(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("configuration,optimizer,seed,loss\r\na,sgd,0,1.0")
    altgrad.record(path, configuration="a", optimizer="sgd", seed=1, loss=2.0)
    assert [row["loss"] for row in rows(path)] == ["1.0", "2.0"]


def test_what_does_not_fit_is_refused_and_the_file_stays(tmp_path):
    path = tmp_path / "results.csv"
    altgrad.record(path, configuration="a", optimizer="sgd", seed=0, loss=1.0)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="has the columns configuration,optimizer,seed,loss; this row has .*,step"):
        altgrad.record(path, configuration="a", optimizer="sgd", seed=0, loss=1.0, step=3)
    for name in ("", "two\nlines", " a"):
        with pytest.raises(ValueError, match="configuration: expected a name on one line"):
            altgrad.record(path, configuration=name, optimizer="sgd", seed=0, loss=1.0)
    with pytest.raises(TypeError):
        altgrad.record(path, configuration="a", optimizer="sgd", seed=0.5, loss=1.0)
    assert path.read_bytes() == before


def test_a_script_waits_for_nothing_heavy():
    code = "import sys, altgrad; print({'torch', 'numpy', 'pandas', 'pydantic', 'yaml', 'ruamel'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
