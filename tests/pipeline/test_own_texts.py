"""One's own texts and weights stay out of git, and every way to run an experiment finds them.

Oracles: git, of what it holds; DVC, of whether a stage has seen the files as they are.
"""

from __future__ import annotations

import json
import shutil
import time

import pytest

from tests.pipeline.conftest import CELLS, Project

SECRET = "Schattenmorelle"
WAYS = {"here": (), "there": ("--temp",), "later": ("--queue",)}


def refs(project: Project) -> list[str]:
    return project.run("git", "for-each-ref", "--format=%(refname)", "refs/exps").stdout.split()


def run(project: Project, name: str, *more: str) -> None:
    """Run an experiment, in the queue too until it has ended."""
    project.run("dvc", "exp", "run", "--name", name, *more)
    if "--queue" in more:
        project.run("dvc", "queue", "start")
        ends = time.monotonic() + 300
        while not any(ref.endswith(f"/{name}") for ref in refs(project)):
            status = project.run("dvc", "queue", "status").stdout
            assert "Failed" not in status and time.monotonic() < ends, status
            time.sleep(1)


def tokens(project: Project) -> int:
    meta = json.loads((project.folder / "data/tokens/meta.json").read_text())
    return sum(split["tokens"] for split in meta["splits"].values())


@pytest.fixture
def own(project: Project) -> Project:
    project.run("git", "config", "user.name", "t")
    project.run("git", "config", "user.email", "t@t")
    return project


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_an_edited_text_is_noticed_and_no_object_of_git_holds_it(own: Project, name: str) -> None:
    text, before = own.folder / "data/corpus/mine.txt", tokens(own)
    own.append("data/corpus/mine.txt", f"\n\nA word from {name}, {SECRET}.\n")
    run(own, name, *WAYS[name], "tokenize")
    (ref,) = (ref for ref in refs(own) if ref.endswith(f"/{name}"))
    (own.folder / "dvc.lock").write_text(own.run("git", "show", f"{ref}:dvc.lock").stdout)
    own.run("dvc", "checkout", "tokenize")
    assert own.run("dvc", "status", "tokenize").stdout.strip().endswith("up to date.")
    assert tokens(own) > before
    assert text.read_text().endswith(f"A word from {name}, {SECRET}.\n") and not text.is_symlink()
    objects = own.run("git", "rev-list", "--objects", "--all", "--reflog").stdout
    assert " data/corpus\n" in objects and text.name not in objects
    commits = own.run("git", "rev-list", "--all", "--reflog").stdout.split()
    assert own.run("git", "grep", "-l", SECRET, *commits, check=False).stdout == ""


@pytest.mark.long
def test_weights_to_start_from_are_found_in_a_temporary_copy_and_stay_out_of_git(own: Project) -> None:
    kept = own.folder / "data/weights/mine"
    shutil.copytree(own.folder / "data/runs" / CELLS[0], kept)
    run(own, "started", "--temp", "-S", "start=data/weights/mine", f"train@{CELLS[0]}")
    assert any(ref.endswith("/started") for ref in refs(own))
    assert "model.safetensors" not in own.run("git", "rev-list", "--objects", "--all", "--reflog").stdout
