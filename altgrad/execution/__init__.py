"""Train and diagnose several cells of a grid at a time, before `dvc repro` would: ``make repro``.

    __main__ -> cells -> pending  -> dvc_api -> dvc_files
                cells -> progress
    __main__ -> local, on_ray

This file is the interface of an executor, which runs the stages of cells on this machine or on others, and all that the
author of a new one has to know. An executor knows nothing of DVC. It takes tasks, runs each, and returns which tasks
ended and how. README.md says how to add one.

**Running a task** means the command ``python -m stages.<stage> <key>`` in the project's top folder, with standard
output and error in the task's log. The task has succeeded if the command's exit status is 0.

**A task reads** these files of the project: ``altgrad/``, ``stages/``, ``data/grid/<key>.json`` and ``data/tokens/``. A
diagnosis also reads ``data/runs/<key>/`` and ``params.yaml``.

**A task writes** its log and ``data/runs/<key>/`` (training) or ``data/diag/<key>.json`` and ``.parquet`` (diagnosis).
These files must be in the project's folder when ``poll`` returns the task as ended. An executor with other machines
copies them back first. The files that a cell resumes from are in ``scratch/``. A stopped cell that runs again with
another ``scratch/`` starts from its first step, and ends with the same bits.

**How many tasks run at once** is the executor's choice. The bits of a cell do not depend on the other tasks or on their
order. They may depend on the number of threads and on the processor. Tasks should have this process's
``OMP_NUM_THREADS``.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from altgrad.common.console import STOPS

LOGS = Path("scratch/workers")
# Exit statuses of a stopped task: 128 + signal after writing a checkpoint, or -signal if the signal killed it.
TOLD_TO_STOP = (*(128 + signum for signum in STOPS), *(-signum for signum in STOPS))
BEGAN = LOGS / "began"  # an empty file that exists while tasks run, made when the first began
HISTORY_FILE = "history.jsonl"  # the rows of a cell that trains, in its folder in scratch/


class Task(NamedTuple):
    """A stage of a cell that has to run."""

    stage: str  # train or diagnose
    key: str  # the cell, such as E4M3-adamw-0-1
    deps: tuple[str, ...]  # hashes of its dependencies when it was planned
    size: int  # optimizer steps to be trained, or 1

    @property
    def name(self) -> str:
        return f"{self.stage}@{self.key}"

    @property
    def log(self) -> Path:
        """The file for all output of the command. Its folder exists, and the file has no output of an earlier run."""
        return LOGS / f"{self.name}.log"

    @property
    def failed(self) -> Path:
        """The file with the sentence that says why the task failed; absent while it runs and after a success."""
        return LOGS / f"{self.name}.failed"

    @property
    def scratch(self) -> Path | None:
        """The newest folder with rows and checkpoints of the cell; None if there is none, or for a diagnosis."""
        if self.stage != "train":
            return None
        name = re.compile(re.escape(self.key) + "-[0-9a-f]{16}")
        near = Path("scratch").glob(f"{self.key}-*")
        folders = (path for path in near if name.fullmatch(path.name) and path.is_dir())
        return max(folders, key=lambda path: path.stat().st_mtime, default=None)


class Outcome(NamedTuple):
    """A task that has ended."""

    task: Task
    status: int  # the command's exit status; not 0 if it failed or could not be run


class Status(NamedTuple):
    """The tasks of an executor: those that run, and those that ended since the last call of ``poll``."""

    running: Sequence[Task]
    ended: Sequence[Outcome]


class Executor(Protocol):
    """Runs tasks. One thread calls it, and may submit more tasks after the first have ended."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue ``tasks`` and return at once, without waiting for them."""

    def poll(self) -> Status:
        """Return the running tasks, and those that have ended since the last call; each ended task is returned once.

        ``poll`` is called ten times a second, and at once after a task has ended. It must not wait for a task. It does
        the executor's recurring work, such as starting the next task.
        """

    def cancel(self, signum: int, only: Collection[str] | None = None) -> None:
        """Drop the waiting tasks, and send ``signum`` (SIGINT or SIGTERM) to every running command.

        A cell then writes a checkpoint, which takes seconds, and ends with status 128 + ``signum``. Do not kill it
        before. ``poll`` is called until no task runs. Dropped tasks are in no outcome. Each further interrupt calls
        ``cancel`` again. Tasks that are submitted later are run.

        With ``only`` (names of tasks), the signal goes to those that are running, and nothing else changes.
        """
