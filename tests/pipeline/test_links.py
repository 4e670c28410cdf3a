"""Outputs and DVC's cache share what they hold, and nothing writes into it. Oracles: inodes, and the cache's own names.

An object of the cache is named after the MD5 of its content, so that whatever wrote into one shows.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

import pytest

from altgrad.common.files import read_json
from altgrad.execution.costs import ROWS, cell_bytes, has_links
from stages import diagnose, grid, report, tokenize, train
from tests.pipeline.conftest import CELLS, Project

PLACES = ("tokens", "grid", "runs", "diag")


def objects(folder: Path) -> list[Path]:
    found = [path for path in (folder / ".dvc/cache/files/md5").rglob("*") if path.is_file()]
    assert found
    return found


def twice(folder: Path) -> list[str]:
    """Return the outputs that are no object of the cache by another name."""
    cached = {path.stat().st_ino for path in objects(folder)}
    files = [path for place in PLACES for path in (folder / "data" / place).rglob("*") if path.is_file()]
    assert len(files) > 20
    return [str(path.relative_to(folder)) for path in files
            if path.name != ".gitignore" and path.stat().st_size and path.stat().st_ino not in cached]  # fmt: skip


def wrong(folder: Path) -> list[str]:
    """Return the objects of the cache that are not what they are called."""
    named = {path: path.parent.name + path.name.removesuffix(".dir") for path in objects(folder)}
    return [name for path, name in named.items() if hashlib.md5(path.read_bytes()).hexdigest() != name]


@pytest.fixture
def linked(finished: Path, project: Project) -> Project:
    """Return the project with its outputs taken from the cache."""
    if not has_links(project.folder):
        pytest.skip("this file system has no hard links")
    for place in PLACES:
        shutil.rmtree(project.folder / "data" / place)
    project.run("dvc", "checkout")
    return project


def test_a_cell_takes_what_was_estimated(finished: Path):
    cell = read_json(finished / f"data/grid/{CELLS[1]}.json")
    found = [*(finished / "data/runs" / CELLS[1]).iterdir(), *(finished / "data/diag").glob(f"{CELLS[1]}.*")]
    tensors = sum(path.stat().st_size for path in found if path.suffix == ".safetensors")
    rest = sum(path.stat().st_size for path in found) - tensors
    assert cell_bytes(cell, 300) - ROWS == pytest.approx(tensors, rel=0.15)
    assert ROWS / 10 < rest < ROWS


def test_what_dvc_repro_has_made_stands_once(finished: Path):
    if not has_links(finished):
        pytest.skip("this file system has no hard links")
    assert twice(finished) == []


@pytest.mark.long
def test_what_was_checked_out_and_what_trains_on_it_stands_once(linked: Project):
    assert twice(linked.folder) == []
    linked.set("grid.formats", ["bf16", "E4M3", "E3M4"])
    linked.run(sys.executable, "-m", "altgrad.execution", "--jobs", "1")
    assert (linked.folder / "data/runs/E3M4-adamw-0-1/metrics.json").exists()
    # What stage `grid` makes anew with the same content, DVC leaves beside the cache's.
    assert [path for path in twice(linked.folder) if not path.startswith("data/grid/")] == []
    assert wrong(linked.folder) == []


def test_no_stage_writes_into_what_is_there_whatever_dvc_has_removed_before(linked: Project, monkeypatch):
    before = {path: path.read_bytes() for path in (linked.folder / "data").rglob("*") if path.is_file()}
    linked.set("grid.formats", ["bf16", "E4M3"])
    linked.set("tokenizer.vocab_size", 290)
    linked.set("train.steps", 7)
    linked.set("diagnose.fisher_tokens", 64)
    monkeypatch.chdir(linked.folder)
    for stage, arguments in ((tokenize, []), (grid, []), (train, CELLS[1:]), (diagnose, CELLS[1:]), (report, [])):
        stage.main(arguments)
    changed = {path.relative_to(linked.folder / "data").parts[0] for path, content in before.items()
               if path.exists() and path.read_bytes() != content}  # fmt: skip
    assert changed == set(PLACES), "all of them wrote"
    assert wrong(linked.folder) == []
