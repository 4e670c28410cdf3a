"""Find the stages that `dvc repro` would run, and hand the outputs of finished tasks to DVC.

A hand-over reads and writes all of dvc.lock and takes longer with more cells, so many tasks are handed over at a time.
An estimate looks for stages that have to run in a copy of the project.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.execution import Task, dvc_api

BEFORE_CELLS = ("tokenize", "grid", "code")
# Between two hand-overs pass at least so many seconds, and so many times as long as the last one took. Cells train on
# the same cores: at five times as long, the hand-overs of 240 cells took a fifth of one core from two.
EVERY, TIMES_AS_LONG = 20, 15
COPIED = (".dvc", "altgrad", "stages", "reports")
LINKED = ("data", ".dvc/cache")  # folders whose files are replaced and removed, and never written in place


def first_tasks() -> tuple[list[Task], list[str]]:
    """Run the changed stages that come before the cells; return the tasks of cells that `dvc repro` would run first.

    The second value has the names of the changed stages without cells, such as ``report``.
    """
    with dvc_api.locked_project() as project:
        project.forget_others()
        for stage in project.others():
            if not stage.is_there():  # DVC would restore it from the cache without a check
                stage.drop_damaged()
        rest = _changed(project)
        if not set(BEFORE_CELLS) & set(rest):
            return pending(project), rest
    if "tokenize" in rest:  # build the C++ loops for training on a core that tokenizing leaves idle
        quiet = subprocess.DEVNULL
        subprocess.Popen([sys.executable, "-m", "stages.loops"], stdin=quiet, stdout=quiet, stderr=quiet)
    dvc_api.reproduce(list(BEFORE_CELLS))
    with dvc_api.locked_project() as project:
        return pending(project), _changed(project)


def rest() -> list[str]:
    """Return the names of the stages without cells that `dvc repro` would run."""
    with dvc_api.locked_project() as project:
        return _changed(project)


def _changed(project: dvc_api.DvcProject) -> list[str]:
    return [stage.name for stage in project.others() if stage.has_changed()]


def pending(project: dvc_api.DvcProject, trained: Collection[str] | None = None) -> list[Task]:
    """Return the tasks that `dvc repro` would run next: cells to train, and trained cells to diagnose.

    ``trained``: keys of cells; if given, only their diagnoses are returned. Results in DVC's run cache are restored, as
    `dvc repro` would. The outputs of the returned tasks are removed, as DVC does before it runs a stage.
    """
    tasks: list[Task] = []
    restored = []
    for stage in ("train", "diagnose"):
        before = {task.key for task in tasks}
        for cell in project.cells_of(stage):
            if cell.key in before or (trained is not None and (stage == "train" or cell.key not in trained)):
                continue
            if not cell.has_changed():
                continue
            cell.remove_outputs()  # what a resumed cell needs is in its scratch directory
            if cell.restore():
                restored.append(cell)
            else:
                size = read_json(Path(f"data/grid/{cell.key}.json"))["train"]["steps"] if stage == "train" else 1
                # Not hashed earlier: with new hashes of its dependencies DVC would take the old outputs for new ones.
                tasks.append(Task(stage, cell.key, cell.hash_dependencies(), size))
    project.write_lock_file(restored)
    return tasks


class HandOver:
    """Hands finished tasks to DVC; ``failures`` has the reasons why DVC refused some, by name of the task.

    A hand-over runs in its own thread, so that idle processes meanwhile get their next task.
    """

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._waiting: list[Task] = []
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[tuple[dict[str, str], list[Task]]] | None = None
        self._ended, self._took = time.monotonic(), 0.0  # time and seconds of the last one

    def add(self, task: Task) -> None:
        self._waiting.append(task)

    def when_due(self, *, last: bool) -> list[Task]:
        """Begin a hand-over if one is due; return the diagnoses to run for cells whose hand-over has ended.

        ``last``: no task runs any more, so hand over all waiting tasks at once, and wait for the end.
        """
        following = self._collected(wait=last)
        late = time.monotonic() - self._ended > max(EVERY, TIMES_AS_LONG * self._took)
        if self._waiting and self._under_way is None and (last or late):
            self._under_way = self._thread.submit(self._hand, self._waiting)
            self._waiting = []
        return following + self._collected(wait=last)

    def _hand(self, tasks: Sequence[Task]) -> tuple[dict[str, str], list[Task]]:
        began = time.monotonic()
        answer = hand_to_dvc(tasks)
        self._ended = time.monotonic()
        self._took = self._ended - began
        return answer

    def _collected(self, *, wait: bool) -> list[Task]:
        if self._under_way is None or not (wait or self._under_way.done()):
            return []
        failures, following = self._under_way.result()
        self._under_way = None
        self.failures |= failures
        return following


def hand_to_dvc(tasks: Sequence[Task]) -> tuple[dict[str, str], list[Task]]:
    """Put the outputs of finished tasks into DVC's cache and dvc.lock.

    Returns the reasons why DVC refused some tasks, by name, and the diagnoses to run for the trained cells.
    """
    planned, failures, saved = {task.name: task.deps for task in tasks}, {}, []
    with dvc_api.locked_project() as project:
        for cell in (cell for stage in ("train", "diagnose") for cell in project.cells_of(stage)):
            if cell.name not in planned:
                continue
            if cell.hash_dependencies() != planned[cell.name]:
                failures[cell.name] = "what it depends on has changed meanwhile; run the same command again"
                continue
            try:
                cell.save()
                saved.append(cell)
            except UserError as error:
                failures[cell.name] = str(error)
        project.write_lock_file(saved)
        trained = {task.key for task in tasks if task.stage == "train" and task.name not in failures}
        return failures, pending(project, trained) if trained else []


@contextmanager
def copied_project() -> Iterator[None]:
    """Work in a copy of the working directory's project, which is removed at the end.

    Large files are hard links, or copies if the file system has none. Compiled code and logs go to the project's own
    folder ``scratch``, and stay.
    """
    root = Path.cwd()
    scratch = root / "scratch"
    scratch.mkdir(exist_ok=True)
    os.environ.setdefault("ALTGRAD_COMPILE_CACHE", str(scratch / "compiled"))
    with TemporaryDirectory(prefix="estimate-", dir=scratch) as folder:
        copy = Path(folder)
        (copy / ".dvc").mkdir()
        for name in filter(os.path.isdir, COPIED):
            shutil.copytree(name, copy / name, ignore=shutil.ignore_patterns("tmp", "cache"), dirs_exist_ok=True)
        for name in filter(os.path.isdir, LINKED):
            shutil.copytree(name, copy / name, copy_function=_link, dirs_exist_ok=True)
        for entry in root.iterdir():
            if entry.is_file():
                shutil.copy2(entry, copy)
            elif entry.name != ".git" and not (copy / entry.name).exists():
                (copy / entry.name).symlink_to(entry)
        dvc_api.make_own(copy)
        os.chdir(copy)
        try:
            yield
        finally:
            os.chdir(root)


def _link(source: str, target: str) -> None:
    """Hard-link ``source`` to ``target``, or copy it; skip a file that another command has removed meanwhile."""
    with suppress(FileNotFoundError):
        try:
            os.link(os.path.realpath(source), target)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(source, target)
