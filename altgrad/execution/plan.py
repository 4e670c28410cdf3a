"""Which stages have to run: those that `dvc repro` would run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from altgrad.config.files import read_json
from altgrad.execution import dvc_api
from altgrad.execution.executor import Task

BEFORE_CELLS = ("tokenize", "grid", "code")


def first_tasks() -> tuple[list[Task], list[str]]:
    """Return what `dvc repro` would run first of the cells, and which stages that are no cell's it would run.

    Those that come before the cells are run now, as far as they have changed.
    """
    with dvc_api.locked_project() as project:
        project.forget_others()
        for found in project.others():
            if not found.is_there():  # DVC would take it from the cache as it is
                found.drop_damaged()
        rest = _changed(project)
        if not set(BEFORE_CELLS) & set(rest):
            return pending(project), rest
    if "tokenize" in rest:
        _build_loops()
    dvc_api.reproduce(list(BEFORE_CELLS))
    with dvc_api.locked_project() as project:
        return pending(project), _changed(project)


def _build_loops() -> None:
    """Start building the loops in C++ that training takes, on a core that tokenizing leaves idle."""
    quiet = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-m", "stages.loops"], stdin=quiet, stdout=quiet, stderr=quiet)


def rest() -> list[str]:
    """Return which stages that are no cell's `dvc repro` would run."""
    with dvc_api.locked_project() as project:
        return _changed(project)


def _changed(project: dvc_api.Project) -> list[str]:
    return [found.name for found in project.others() if found.has_changed()]


def pending(project: dvc_api.Project, trained: Collection[str] | None = None) -> list[Task]:
    """Return what `dvc repro` would run next of the cells; what it would take from the run cache is taken from it now.

    Cells to train, and to diagnose those that are trained; ``trained`` names cells of which only the diagnoses are
    asked for. The outputs of what has to run are removed, as DVC does before it runs a stage.
    """
    tasks: list[Task] = []
    restored = []
    for stage in ("train", "diagnose"):
        before = {task.key for task in tasks}
        for found in project.cells_of(stage):
            if found.key in before or (trained is not None and (stage == "train" or found.key not in trained)):
                continue
            if not found.has_changed():
                continue
            found.remove_outputs()  # what a resumed cell needs is in its scratch directory
            if found.restore():
                restored.append(found)
            else:
                # Not sooner: a new hash of what it needs would make its old outputs look new.
                tasks.append(Task(stage, found.key, found.hash_dependencies(), _size(stage, found.key)))
    project.write_lock_file(restored)
    return tasks


def _size(stage: str, key: str) -> int:
    return read_json(Path(f"data/grid/{key}.json"))["train"]["steps"] if stage == "train" else 1
