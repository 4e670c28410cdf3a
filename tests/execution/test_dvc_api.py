"""DVC's inner modules are as this project uses them. Oracle: the installed DVC.

When one of these fails after a new DVC was installed, the message says what has changed in it.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import dvc
import pytest
from dvc.dependency import ParamsDependency
from dvc.output import Output
from dvc.repo import Repo
from dvc.stage import Stage

from altgrad.config import UserError
from altgrad.execution import dvc_api
from altgrad.execution.dvc_api import MEMBERS, TRIED_VERSIONS, check_members, locked_project
from altgrad.execution.pending import first_tasks
from tests.execution.conftest import PIPELINE
from tests.pipeline.conftest import PROJECT, environment


def test_the_installed_dvc_is_one_that_this_was_tried_with():
    assert dvc.__version__ in TRIED_VERSIONS, (
        f"DVC {dvc.__version__} is new here: when the other tests of tests/execution pass, add it to TRIED_VERSIONS"
    )
    pinned = re.search(r"^dvc==(.+)$", (PROJECT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned[1] in TRIED_VERSIONS, "constraints.txt installs another one"


@pytest.mark.parametrize("class_name", MEMBERS)
def test_dvc_has_every_member_that_is_used(folder: Path, class_name: str):
    with Repo() as repo:
        stage = next(found for found in repo.index.stages if found.name == "train@a")
        objects = {
            "Repo": [repo], "Index": [repo.index], "StageCache": [repo.stage_cache], "Stage": [stage],
            "Dependency": stage.deps, "Output": stage.outs, "DvcFile": [stage.dvcfile],
            "ParamsDependency": [dep for dep in stage.deps if isinstance(dep, ParamsDependency)],
        }  # fmt: skip
        assert len(stage.deps) == 2, "a file and a setting"
        assert objects[class_name]
        for found in objects[class_name]:
            check_members(found, class_name)


def test_every_member_that_is_used_is_listed():
    """Of the variables that hold DVC's objects, every attribute is in ``MEMBERS``, and nothing else is in it."""
    chains = [ast.unparse(node) for node in ast.walk(ast.parse(inspect.getsource(dvc_api)))
              if isinstance(node, ast.Attribute)]  # fmt: skip
    held = ("self._stage.", "self._repo.", "repo.", "stage.", "stages[0].", "dep.", "out.", "found.")
    used = {name for chain in chains for start in held if chain.startswith(start)
            for name in chain.removeprefix(start).split(".")}  # fmt: skip
    assert used == {name for members in MEMBERS.values() for name in members}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda patch: patch.delattr(Stage, "save_deps"), "Stage.save_deps is missing"),
        (lambda patch: patch.setattr(Stage, "commit", lambda self, place: None), "Stage.commit cannot be given"),
    ],
)
def test_what_dvc_lacks_is_one_sentence_before_anything_is_touched(folder: Path, monkeypatch, change, words):
    (folder / "data/runs").mkdir()
    (folder / "data/runs/a").write_text("an old result")
    change(monkeypatch)
    with pytest.raises(UserError) as error:
        first_tasks()
    assert words in str(error.value) and TRIED_VERSIONS[0] in str(error.value) and "\n" not in str(error.value)
    assert (folder / "data/runs/a").read_text() == "an old result"


def test_a_module_of_dvc_that_has_gone_is_one_sentence():
    code = "import dvc.stage.cache\ndel dvc.stage.cache.RunCacheNotFoundError\n"
    code += "import sys\nfrom altgrad.execution.__main__ import main\nfrom altgrad.common.errors import run_stage\n"
    code += "sys.argv[1:] = []\nrun_stage(main)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=PROJECT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.match("error: DVC .* cannot import name 'RunCacheNotFoundError' from 'dvc.stage.cache';", done.stderr)


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
