"""The miniature of the real pipeline, executors and a DVC that do as they are told, and the README's executor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from dvc.repo import Repo

from altgrad.execution import Outcome, Status, Task, cells, pending
from tests.pipeline.conftest import PROJECT, finished, planned, project

__all__ = ["example", "finished", "planned", "project"]


class AtOnce:
    """Stands in for a pool of threads: what it is given is done when it is given it."""

    def __init__(self, threads: int) -> None:
        assert threads == 1

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(function(*arguments))
        return future


TASKS = [Task("train", key, (), 10) for key in "abc"]


class Scripted:
    """Starts all tasks at once; every poll answers with the next of ``endings``: what ended by then, and how.

    An ending may also be a function, which is called instead. Cancelled tasks end at the next poll.
    """

    def __init__(self, *endings: dict[str, int] | Callable[[], None]) -> None:
        self.running: list[Task] = []
        self.endings, self.signals = list(endings), []

    def submit(self, tasks: Sequence[Task]) -> None:
        self.running += tasks

    def poll(self) -> Status:
        ending = {task.key: 143 for task in self.running} if self.signals else self.endings.pop(0)
        if callable(ending):
            ending()
            ending = {}
        ended = [Outcome(task, ending[task.key]) for task in self.running if task.key in ending]
        self.running = [task for task in self.running if task.key not in ending]
        return Status(list(self.running), ended)

    def cancel(self, signum: int) -> None:
        self.signals.append(signum)


@pytest.fixture
def handed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the keys that were handed to DVC, one list for each time."""
    handed: list[list[str]] = []

    def hand_to_dvc(tasks: Sequence[Task]) -> tuple[dict[str, str], list[Task]]:
        handed.append([task.key for task in tasks])
        return {task.name: "refused" for task in tasks if task.key == "c"}, []

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/grid").mkdir(parents=True)
    (tmp_path / "data/grid/index.json").write_text('{"cells": []}')
    monkeypatch.setattr(pending, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(pending, "hand_to_dvc", hand_to_dvc)
    monkeypatch.setattr(cells, "POLL_SECONDS", 0.001)
    return handed


@pytest.fixture
def diagnosed(handed: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the names of tasks that were handed to DVC, at once: diagnoses follow what was trained."""

    def hand_to_dvc(tasks: Sequence[Task]) -> tuple[dict[str, str], list[Task]]:
        handed.append([task.name for task in tasks])
        return {}, [Task("diagnose", task.key, (), 1) for task in tasks if task.stage == "train"]

    monkeypatch.setattr(pending, "hand_to_dvc", hand_to_dvc)
    monkeypatch.setattr(pending, "EVERY", 0)
    monkeypatch.setattr(pending, "TIMES_AS_LONG", 0)
    return handed


PIPELINE = """
stages:
  train:
    matrix: {letter: [a, b]}
    cmd: mkdir -p data/runs && cp data/grid/${key}.json data/runs/${key}
    params: [setting]
    deps: ["data/grid/${key}.json"]
    outs: ["data/runs/${key}"]
"""


def begin() -> None:
    """Make the working directory a project of two cells that have never run."""
    Path("data/grid").mkdir(parents=True)
    Path("dvc.yaml").write_text(PIPELINE)
    Path("params.yaml").write_text("setting: 1\n")
    for key in "ab":
        Path(f"data/grid/{key}.json").write_text('{"train": {"steps": 7}}')
    Repo.init(no_scm=True).close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, which is such a project."""
    monkeypatch.chdir(tmp_path)
    begin()
    return tmp_path


def example() -> str:
    """Return the Python code in the package's README."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (PROJECT / "altgrad/execution/README.md").read_text(), re.M | re.S)
    return code
