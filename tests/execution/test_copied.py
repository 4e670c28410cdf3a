"""What is done in a copy of a project is done there alone. Oracle: every file of the project, before and after."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
from dvc.config import Config

from altgrad.execution import dvc_api, plan
from altgrad.execution.copied import copied_project


def state(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return what is in every file of a project, and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and "scratch" not in path.parts]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_settings_outputs_and_the_lock_file_are_as_they_were(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, elsewhere: bool, stopped: bool
) -> None:
    """What the cache has is found there too, wherever the cache lies."""
    if elsewhere:
        with Config(str(folder / ".dvc")).edit("local") as settings:
            settings["cache"] = {"dir": os.path.relpath(tmp_path_factory.mktemp("cache"), folder)}
    (folder / "texts").mkdir()
    (folder / "texts/mine.txt").write_text("text")
    dvc_api.reproduce(["train"])
    before = state(folder)
    with suppress(KeyboardInterrupt), copied_project():
        assert Path.cwd() != folder and Path("texts/mine.txt").read_text() == "text"
        Path("data/runs/a").unlink()
        with dvc_api.locked_project() as project:
            assert plan.pending(project) == [] and Path("data/runs/a").exists()
        Path("params.yaml").write_text("setting: 2\n")
        with dvc_api.locked_project() as project:
            assert [task.key for task in plan.pending(project)] == ["a", "b"]
        dvc_api.reproduce(["train"])
        assert "setting: 2" in Path("dvc.lock").read_text()
        if stopped:
            raise KeyboardInterrupt
    assert Path.cwd() == folder and state(folder) == before and not list(folder.glob("scratch/*"))
