"""What an executor is: something that runs the stages of cells, here or on other machines.

An executor knows nothing of DVC. It is given tasks, runs each, and says which ended and how. This file has everything
that another engine needs.

**Running a task** means the command ``python -m stages.<stage> <key>`` in the project's top folder, with standard
output and error in the task's log. It has ended well when the command's exit status is 0.

**What it reads** is in the project's folder: ``altgrad/``, ``stages/``, ``data/grid/<key>.json`` and ``data/tokens/``,
and to diagnose ``data/runs/<key>/`` and ``params.yaml``.

**What it writes** must be in the project's folder by the time that ``poll`` says that the task has ended:
``data/runs/<key>/`` from training, ``data/diag/<key>.json`` and ``.parquet`` from diagnosing, and the log. An executor
with machines of its own brings them back first. What a cell needs to resume is in ``scratch/``: a cell that is stopped
and later runs with another ``scratch/`` starts again from its first step, and ends with the same bits.

**How many run at once** is for the executor to choose. The bits of a cell do not depend on its neighbours, nor on the
order; they may depend on the number of threads and on the processor. An executor that does not take over
``OMP_NUM_THREADS`` from this process should set it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from altgrad.common.console import STOPS

LOGS = Path("scratch/workers")
# Exit statuses of a task that was told to stop: of training, which writes a checkpoint, and of what dies of the signal.
TOLD_TO_STOP = (*(128 + signum for signum in STOPS), *(-signum for signum in STOPS))
BEGAN = LOGS / "began"  # an empty file that exists while tasks are run, as old as the first of them
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
        """The file that all output of the command goes to. Its folder exists, and it has nothing of an earlier run."""
        return LOGS / f"{self.name}.log"

    @property
    def failed(self) -> Path:
        """The file with the sentence that says why it failed; absent while it runs and after it ended well."""
        return LOGS / f"{self.name}.failed"

    @property
    def scratch(self) -> Path | None:
        """The newest folder in which the cell keeps rows and checkpoints while it trains; None if there is none."""
        if self.stage != "train":
            return None
        name = re.compile(re.escape(self.key) + "-[0-9a-f]{16}")
        near = Path("scratch").glob(f"{self.key}-*")
        folders = (path for path in near if name.fullmatch(path.name) and path.is_dir())
        return max(folders, key=lambda path: path.stat().st_mtime, default=None)


class Outcome(NamedTuple):
    """A task that has ended."""

    task: Task
    status: int  # the command's exit status; anything but 0 is a failure, also where no command came to run


class Status(NamedTuple):
    """What an executor is doing."""

    running: Sequence[Task]  # tasks that have started and not ended
    ended: Sequence[Outcome]  # tasks that have ended since the last time


class Executor(Protocol):
    """Runs tasks. It is called from one thread, and it may be given more tasks when the first have ended."""

    def submit(self, tasks: Sequence[Task]) -> None:
        """Take tasks to be run, and return without waiting for them."""

    def poll(self) -> Status:
        """Return what is running and what has ended since the last call, each task once.

        It is called ten times a second, and at once after something has ended, and must not wait for a task. Work that
        an executor has to do from time to time, such as starting the next task, is done here.
        """

    def cancel(self, signum: int, only: Collection[str] | None = None) -> None:
        """Start nothing more, and send ``signum`` (SIGINT or SIGTERM) to every command that is running.

        A cell that gets the signal writes a checkpoint and ends with status 128 + ``signum``, which takes seconds:
        leave it alone until then. ``poll`` is called until nothing is running any more. Tasks that had not started are
        forgotten, and are in no outcome. Every further interrupt is a further call. Tasks that are submitted after it
        are run.

        With ``only``, names of tasks, those of them that are running get the signal, and nothing else changes.
        """
