"""A watcher's rows and states are those of a cell's outputs, whenever it looked and whatever happened.

Oracle: the files of the finished run; lines of a growing file come once, in order and whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import altgrad.watch as watched
from altgrad.common.files import read_json, write_json
from altgrad.config import UserError
from altgrad.execution import Task
from altgrad.watch import DIAGNOSED, FAILED, PAUSED, TRAINED, TRAINS, WAITS, Lines, Project
from altgrad.watch.events import _cell


class Reader:
    """Somebody who remembers the rows that changes brought."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.rows: dict[str, list[list[float | None]]] = {}

    def look(self) -> None:
        changes = self.project.look()
        if self.project.restarted:
            self.rows = {}
        for change in changes:
            rows = [] if change.again else self.rows.get(change.cell.key, [])
            self.rows[change.cell.key] = rows + [[row.step, *row.values.values()] for row in change.rows]


@pytest.mark.parametrize("seed", range(5))
def test_the_rows_are_those_of_history_csv_whenever_one_looks_and_however_often_a_run_is_stopped(seed, play):
    game, chance = play(), random.Random(seed)
    early, late = Reader(Project(game.root)), Reader(Project(game.root))
    early.look()
    for key in game.keys:
        step = 0
        while step < 60:
            step += chance.choice((10, 10, 20))
            game.train(key, step)
            if chance.random() < 0.3:
                early.look()
            if chance.random() < 0.2:
                step = min(step, chance.choice((0, 20, 40)))
                game.resume(key, step)
            if chance.random() < 0.3:
                early.look()
        game.finish(key)
        if chance.random() < 0.5:
            shutil.rmtree(game.log(key).parent)
        game.diagnose(key)
    early.look()
    late.look()
    for key in game.keys:
        assert early.rows[key] == late.rows[key] == game.history(key)
    for cell in early.project.cells.values():
        assert cell.state == DIAGNOSED and cell.step == 60
        assert cell.metrics == read_json(game.root / "data/runs" / cell.key / "metrics.json")
    assert early.project.look() == []


def test_a_cell_waits_trains_pauses_has_trained_and_is_diagnosed(play):
    game = play(seeds=(0,))
    project, key = Project(game.root), game.keys[0]
    project.look()
    cell = project.cells[key]
    assert cell.state == WAITS and not cell.is_over
    game.train(key, 20)
    project.look()
    assert (cell.state, cell.step, cell.outcome) == (TRAINS, 20, "")
    os.utime(game.log(key), (1.5e9, 1.5e9))
    (change,) = project.look()
    assert (change.cell.state, change.rows) == (PAUSED, [])
    log = game.root / Task("train", key, (), 1).log
    log.parent.mkdir(parents=True)
    log.write_text("a progress bar")
    project.look()
    assert cell.state == TRAINS, "it says something"
    game.finish(key)
    project.look()
    assert (cell.state, cell.outcome) == (TRAINED, "completed") and cell.is_over
    game.diagnose(key)
    project.look()
    assert cell.state == DIAGNOSED


def test_a_cell_that_failed_says_why_until_it_trains_again(play):
    game = play(seeds=(0,))
    project, key = Project(game.root), game.keys[0]
    game.train(key, 20)
    failed = game.root / Task("train", key, (), 1).failed
    failed.parent.mkdir(parents=True)
    failed.write_text("its process was ended by SIGSEGV\n")
    project.look()
    assert (project.cells[key].state, project.cells[key].why) == (FAILED, "its process was ended by SIGSEGV")
    failed.unlink()
    game.train(key, 30)
    project.look()
    assert (project.cells[key].state, project.cells[key].why) == (TRAINS, "")
    game.finish(key)
    (game.root / Task("diagnose", key, (), 1).failed).write_text("no")
    project.look()
    assert (project.cells[key].state, project.cells[key].why) == (TRAINED, "no")


def test_a_cell_whose_outputs_are_taken_away_trains_anew(play):
    game = play(seeds=(0,))
    reader, key = Reader(Project(game.root)), game.keys[0]
    game.finish(key)
    reader.look()
    shutil.rmtree(game.root / "data/runs" / key)
    reader.look()
    cell = reader.project.cells[key]
    assert (cell.state, cell.step, cell.outcome, reader.rows[key]) == (WAITS, 0, "", [])
    game.train(key, 10)
    reader.look()
    assert reader.rows[key] == game.history(key)[:2]


def test_of_two_scratch_folders_the_one_that_was_written_to_last_counts(play):
    game = play(seeds=(0,))
    reader, key = Reader(Project(game.root)), game.keys[0]
    old = game.root / "scratch" / f"{key}-fedcba9876543210" / "history.jsonl"
    game.train(key, 40)
    old.parent.mkdir()
    old.write_text(game.log(key).read_text())
    os.utime(old, (2e9, 2e9))
    reader.look()
    os.utime(old, (1.5e9, 1.5e9))
    game.resume(key, 10)
    reader.look()
    assert reader.rows[key] == game.history(key)[:2]


def test_another_grid_is_another_beginning(play):
    game = play(seeds=(0,))
    reader = Reader(Project(game.root))
    game.finish(game.keys[0])
    reader.look()
    assert reader.project.restarted
    reader.look()
    assert not reader.project.restarted
    index = game.root / "data/grid/index.json"
    write_json(index, read_json(index) | {"cells": game.keys[1:]})
    reader.look()
    assert reader.project.restarted and list(reader.project.cells) == game.keys[1:]


def test_a_change_of_recipe_is_seen_while_a_cell_trains_after_it_resumed_and_when_it_is_over(play):
    game = play(seeds=(0,))
    key, early = game.keys[1], Project(game.root)
    rows = [[*row, "E4M3" if row[0] < 30 else "bf16"] for row in game.history(key)]
    game.log(key).parent.mkdir(parents=True)
    for stop in (20, 40, 20, 60):
        game.log(key).write_text("".join(json.dumps(row) + "\n" for row in rows if row[0] <= stop))
        early.look()
        assert early.cells[key].recipes == [(0, "E4M3"), (30, "bf16")][: 1 + (stop > 20)]
    game.finish(key)
    kept = game.root / "data/runs" / key / "history.csv"
    frame = pd.read_csv(kept)
    frame.assign(recipe=[row[-1] for row in rows]).to_csv(kept, index=False)
    late = Project(game.root)
    for project in (early, late):
        project.look()
        assert project.cells[key].recipes == [(0, "E4M3"), (30, "bf16")]
        assert _cell(project.cells[key], "val_loss")["changes"] == [(30, "bf16")]
        assert "changes" not in _cell(project.cells[game.keys[0]], "val_loss")


def test_without_a_grid_one_sentence_says_so(tmp_path):
    with pytest.raises(UserError, match="no grid to watch"):
        Project(tmp_path).look()


LETTERS = st.characters(blacklist_characters="\n", blacklist_categories=["Cs"])


TEXT = st.lists(st.text(LETTERS, max_size=20), max_size=20)


@settings(deadline=None, max_examples=50)
@given(lines=TEXT, cuts=st.lists(st.integers(0, 400), max_size=10), at_once=st.integers(100, 300))
def test_lines_come_once_and_in_order_wherever_the_writing_is_cut(tmp_path_factory, lines, cuts, at_once):
    path = tmp_path_factory.mktemp("log") / "rows"
    whole = "".join(f"{line}\n" for line in lines).encode()
    follower, found = Lines(path), []
    before, watched.AT_ONCE = watched.AT_ONCE, at_once  # more than a line, less than the file
    try:
        start = 0
        for cut in [*sorted(cuts), len(whole)]:
            with open(path, "ab") as file:
                file.write(whole[start:cut])
            start = max(start, min(cut, len(whole)))
            found += follower.new()
        while more := follower.new():
            found += more
    finally:
        watched.AT_ONCE = before
    assert [line.decode() for line in found] == lines
    assert follower.new() == [] and not follower.restarted


def test_a_file_in_the_place_of_another_is_read_from_its_beginning(tmp_path):
    path, other = tmp_path / "rows", tmp_path / "other"
    path.write_bytes(b"a\nb\nc\n")
    follower = Lines(path)
    assert follower.new() == [b"a", b"b", b"c"] and not follower.restarted and Lines(tmp_path / "none").new() == []
    other.write_bytes(b"a\nb\n2\n3\n")  # longer than what has been read: its size alone does not tell
    os.replace(other, path)
    assert follower.new() == [b"a", b"b", b"2", b"3"] and follower.restarted
    with open(path, "ab") as file:
        file.write(b"4\n")
    assert follower.new() == [b"4"] and not follower.restarted
    with open(path, "r+b") as file:
        file.truncate(2)
    assert follower.new() == [b"a"] and follower.restarted, "it became shorter"
