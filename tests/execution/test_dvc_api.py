"""DVC's inner modules are as this project uses them. Oracle: the installed DVC.

When one of these fails after a new DVC was installed, dvc_api.py has to change.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from dvc.dependency import ParamsDependency
from dvc.output import Output
from dvc.repo import Repo

from altgrad.common.errors import UserError
from altgrad.common.files import read_yaml
from altgrad.execution import dvc_api
from altgrad.execution.dvc_api import locked_project
from altgrad.execution.pending import first_tasks, hand_to_dvc
from tests.execution.conftest import PIPELINE


def test_a_stage_that_has_not_run_is_pending_until_its_outputs_are_saved(folder: Path):
    tasks, _ = first_tasks()
    assert [(task.name, task.key, task.size, len(task.deps)) for task in tasks] == [
        ("train@a", "a", 7, 2), ("train@b", "b", 7, 2),
    ]  # fmt: skip
    (folder / "data/runs").mkdir()
    (folder / "data/runs/a").write_text("a result")
    with locked_project() as project:
        cell = next(cell for cell in project.cells_of("train") if cell.key == "a")
        cell.hash_dependencies()
        cell.save()
        project.write_lock_file([cell])
    assert [task.key for task in first_tasks()[0]] == ["b"]


def test_cells_of_further_models_follow_and_their_tasks_are_called_as_any_others(folder: Path):
    more = PIPELINE.partition("stages:")[2].replace("train:", "train_models:").replace("[a, b]", "[a-x, b-x]")
    (folder / "dvc.yaml").write_text(PIPELINE + more)
    for key in ("a-x", "b-x"):
        (folder / f"data/grid/{key}.json").write_text('{"train": {"steps": 7}}')
    assert [task.name for task in first_tasks()[0]] == ["train@a", "train@b", "train@a-x", "train@b-x"]
    (folder / "data/runs").mkdir()
    for key in ("a", "a-x"):
        (folder / f"data/runs/{key}").write_text("a result")
    done = [task for task in first_tasks()[0] if task.key in ("a", "a-x")]
    for task in done:
        (folder / f"data/runs/{task.key}").write_text("a result")
    assert hand_to_dvc(done) == ({}, [])
    assert {task.key for task in first_tasks()[0]} == {"b", "b-x"}
    assert {"train@a", "train_models@a-x"} == set(read_yaml(folder / "dvc.lock")["stages"])


def test_a_setting_that_params_yaml_lacks_is_named_in_a_sentence(folder: Path):
    (folder / "dvc.yaml").write_text(PIPELINE.replace("[a, b]", '"${grid.models}"'))
    with pytest.raises(UserError, match=r"^params\.yaml lacks a setting that dvc\.yaml reads.*'grid\.models'"):
        first_tasks()


def test_the_repository_is_opened_once_and_sees_what_has_changed(folder: Path, monkeypatch):
    opened, original = [], dvc_api.Repo
    monkeypatch.setattr(dvc_api, "Repo", lambda root: opened.append(root) or original(root))
    assert [task.key for task in first_tasks()[0]] == ["a", "b"]
    dvc_api.reproduce(["train"])
    assert first_tasks() == ([], [])
    (folder / "params.yaml").write_text("setting: 2\n")
    (folder / "dvc.yaml").write_text(PIPELINE.replace("[a, b]", "[b]"))
    assert [task.key for task in first_tasks()[0]] == ["b"] and len(opened) == 1


def test_what_the_run_cache_has_is_put_back(folder: Path):
    with Repo() as repo:
        repo.reproduce()
    (folder / "dvc.lock").unlink()
    (folder / "data/runs/a").unlink()
    assert first_tasks() == ([], [])
    assert (folder / "data/runs/a").exists()
    with Repo() as repo:
        assert repo.status() == {}, "dvc.lock has it again"


def test_what_cells_share_is_read_once_and_by_each_session_anew(folder: Path, monkeypatch):
    (folder / "dvc.yaml").write_text(PIPELINE.replace('.json"]', '.json", code]', 1))
    (folder / "code").mkdir()
    (folder / "code/train.py").write_text("1")
    read: list[str] = []

    def counted(of: type, name: str) -> None:
        original = getattr(of, name)

        def reading(self: object, *arguments: object, **options: object) -> object:
            read.append(str(self))
            return original(self, *arguments, **options)

        monkeypatch.setattr(of, name, reading)

    counted(Output, "_build")
    counted(ParamsDependency, "read_params")

    def dependencies() -> dict[str, tuple[str, ...]]:
        read.clear()
        with locked_project() as project:
            for _ in range(2):
                hashes = {cell.key: cell.hash_dependencies() for cell in project.cells_of("train")}
            return hashes

    before = dependencies()
    assert read.count("code") == read.count("params.yaml") == 1
    assert read.count("data/grid/a.json") == 2, "a cell's own file is hashed when asked"
    with Repo() as repo:
        stage = next(member for member in repo.index.stages if member.name == "train@a")
        stage.save_deps()
        assert before["a"] == tuple(str(dep.hash_info) for dep in stage.deps), "as DVC does it"
    (folder / "code/train.py").write_text("another")
    (folder / "params.yaml").write_text("setting: 2\n")
    after = dependencies()
    assert all("{'setting': 2}" in str(hashes) for hashes in after.values())
    assert all(len(set(after[key]) & set(before[key])) == 1 for key in "ab"), "its own file alone is as it was"
