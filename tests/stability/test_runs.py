"""The cells of a search, what became of them, and the page that says it. Oracle: edges that were put in."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from altgrad.common.files import write_json
from altgrad.config import UserError
from altgrad.stability import Edge, Ladder, Search, edge_of
from altgrad.stability.__main__ import _ladder, _restored, _variants, write
from tests.pipeline.conftest import Project

WITHIN = 0.1
# The first unstable rung of each format and arm: far up, none, next to the arm's own rate, below it, at the bottom.
FIRST = {
    ("E4M3", "adamw"): 5, ("E4M3", "rung"): 9, ("E4M3", "eco"): -1,
    ("E7M0", "adamw"): 1, ("E7M0", "rung"): -3, ("E7M0", "eco"): -1,
}  # fmt: skip
LADDER = Ladder(-3, 6)


def pretend(runs: Path, key: str, rung: int, pair: tuple[str, str], seed: int) -> None:
    """Write what a cell came to: beyond the edge seed 0 diverges, and seed 1 ends higher. E7M0 costs something."""
    fails = rung >= FIRST[pair]
    diverged = fails and (seed == 0 or FIRST[pair] < 0)
    loss = 3.5 + 0.3 * (pair[0] == "E7M0") + (0.3 if fails else 0.09 * (rung != 0))
    write_json(runs / key / "metrics.json", {
        "format": pair[0], "optimizer": pair[1], "seed": seed, "outcome": "diverged" if diverged else "completed",
        "outcome_step": 31 if diverged else None, "signature": "spike" if diverged else None,
        "val_loss": None if diverged else loss,
    })  # fmt: skip


def run(runs: Path) -> tuple[Search, int]:
    """Search to the end; return the search, and how many cells it took."""
    search = Search(["E4M3", "E7M0"], ["adamw", "rung", "eco"], [0, 1], LADDER, WITHIN)
    count = 0
    while needed := search.needed():
        for key, (pair, rung) in needed.items():
            pretend(runs, key, rung, pair, int(key.split("-")[2]))
            count += 1
        search.judge(runs)
    return search, count


def test_the_edges_that_were_put_in_are_found(tmp_path):
    search, count = run(tmp_path)
    assert {pair: edge_of(known) for pair, known in search.known.items()} == {
        ("E4M3", "adamw"): Edge(4, 5), ("E4M3", "rung"): Edge(6, None), ("E4M3", "eco"): Edge(-2, -1),
        ("E7M0", "adamw"): Edge(0, 1), ("E7M0", "rung"): Edge(None, -3), ("E7M0", "eco"): Edge(-2, -1),
    }  # fmt: skip
    assert count == len(search.rows(tmp_path)) < 0.6 * 6 * 2 * len(LADDER.scales)
    assert Search(["E4M3"], ["adamw"], [0, 1], LADDER, WITHIN).needed().keys() == {
        "E4M3-adamw-0-1", "E4M3-adamw-1-1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rungs", "known"), [({0: 0}, {}), ({0: 9, 1: 0}, {("E4M3", "adamw"): {0: False}})], ids=["one seed", "one fails"]
)
def test_a_rung_is_stable_if_all_seeds_are_there_and_stable(tmp_path, rungs, known):
    search = Search(["E4M3"], ["adamw"], [0, 1], LADDER, WITHIN)
    for seed, rung in rungs.items():
        pretend(tmp_path, f"E4M3-adamw-{seed}-1", rung, ("E4M3", "adamw"), seed)
    search.judge(tmp_path)
    assert search.known == known and (known or len(search.needed()) == 2)


def test_the_page_says_where_stability_ends_and_what_happens_beyond(tmp_path):
    search, _ = run(tmp_path / "runs")
    rows = pd.DataFrame(search.rows(tmp_path / "runs")).assign(variant="")
    write(rows, LADDER, WITHIN, tmp_path, "the command", "What was trained.")
    text = (tmp_path / "STABILITY.md").read_text()
    found = [(re.search(r"\*\*(\w+)\*\* \| `(\w+)`", line), line) for line in text.splitlines()]
    lines = {match.groups(): line for match, line in found if match}
    happens = "diverges (spike) in 1 and ends higher in 1"
    assert f"| 16 | 3.5900 | {happens}, 3.8000 |" in lines["E4M3", "adamw"]
    assert "| 64 or more | 3.5900 | – |" in lines["E4M3", "rung"]
    assert f"| 1 | 3.8000 | {happens}, 4.1000 |" in lines["E7M0", "adamw"]
    assert "| below 0.1250 |" in lines["E7M0", "rung"] and "| diverges (spike) |" in lines["E7M0", "rung"]
    assert (tmp_path / "figures/stability.png").exists()
    assert len(pd.read_csv(tmp_path / "results.csv")) == len(rows)


@pytest.mark.parametrize("rungs", [(0, 0), (1, 3), (-3, -1), (-9, 3), (0, 13)])
def test_a_ladder_without_the_arms_own_rate_or_too_long_is_refused(rungs):
    with pytest.raises(UserError, match="--rungs: expected a range"):
        _ladder(*rungs)


def test_every_combination_of_what_is_varied_is_searched():
    assert _variants([]) == [[]]
    assert _variants(["train.warmup=0,0.1", "train.batch=4"]) == [
        ["train.warmup=0", "train.batch=4"], ["train.warmup=0.1", "train.batch=4"]
    ]  # fmt: skip
    for wrong in ("train.warmup", "=1", "train.warmup="):
        with pytest.raises(UserError, match="--vary: expected NAME=A,B"):
            _variants([wrong])


def test_params_yaml_is_as_it_was_whatever_happens(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("a: 1  # with its comments\n")
    with pytest.raises(KeyError), _restored(path):
        path.write_text("b: 2\n")
        raise KeyError
    assert path.read_text() == "a: 1  # with its comments\n"


@pytest.mark.slow
def test_a_search_of_the_real_thing_ends_and_a_second_one_trains_nothing(tmp_path):
    project = Project(tmp_path / "project")
    before = (project.folder / "params.yaml").read_text()
    command = (sys.executable, "-m", "altgrad.stability", "--jobs", "2", "--rungs", "-1", "2")
    command += ("--vary", "train.warmup=0.0,0.5")
    project.run(*command)
    assert (project.folder / "params.yaml").read_text() == before
    rows = pd.read_csv(project.folder / "reports/stability/results.csv")
    assert set(rows["variant"]) == {"train.warmup=0.0", "train.warmup=0.5"} and set(rows["format"]) == {"bf16", "E4M3"}
    logs = {log: log.stat().st_mtime_ns for log in (project.folder / "scratch/workers").glob("train@*.log")}
    project.run(*command)
    assert {log: log.stat().st_mtime_ns for log in (project.folder / "scratch/workers").glob("train@*.log")} == logs
