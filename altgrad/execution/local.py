"""The executor of one machine: every task in a process of its own, so many at a time.

The processes are forked from one that has loaded the libraries and none of this project, which every process loads
for itself: that takes a third of the time of a small cell.

Each process has as many threads as there are cores for it, unless ``train.threads`` says otherwise, and one GPU if
there are any.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import NamedTuple

from altgrad.config.process import usable_cores
from altgrad.execution.executor import Outcome, Status, Task

LIBRARIES = ["torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "pandas", "pyarrow.parquet"]


class _Worker(NamedTuple):
    """A task in a process."""

    task: Task
    slot: int  # of the pool's jobs; it decides the GPU
    process: BaseProcess


class LocalPool:
    """Up to ``jobs`` tasks at a time on this machine. Nothing is loaded or started before the first task."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._waiting: deque[Task] = deque()
        self._running: list[_Worker] = []

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue ``tasks`` behind those that wait."""
        self._waiting.extend(tasks)

    def poll(self) -> Status:
        """Fill the free slots, and say what is running and what has ended."""
        while self._waiting and len(self._running) < self._jobs:
            self._running.append(self._start(self._waiting.popleft()))
        ended = [worker for worker in self._running if not worker.process.is_alive()]
        self._running = [worker for worker in self._running if worker not in ended]
        outcomes = [Outcome(worker.task, worker.process.exitcode) for worker in ended]
        return Status([worker.task for worker in self._running], outcomes)

    def cancel(self, signum: int) -> None:
        """Forget what waits, and pass the signal on."""
        self._waiting.clear()
        for worker in self._running:
            with suppress(ProcessLookupError):  # it has ended since the last poll
                os.kill(worker.process.pid, signum)

    def _start(self, task: Task) -> _Worker:
        slot = min(set(range(self._jobs)) - {worker.slot for worker in self._running})
        environment = {"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {}
        arguments = (task.stage, task.key, str(task.log), environment)
        process = self._context.Process(target=_run_stage_module, args=arguments)
        process.start()
        return _Worker(task, slot, process)

    @cached_property
    def _context(self) -> ForkServerContext:
        os.environ["OMP_NUM_THREADS"] = str(threads_each(self._jobs))  # the processes inherit it
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        return context

    @cached_property
    def _gpus(self) -> list[str]:
        """What ``CUDA_VISIBLE_DEVICES`` must be for a process to see each of this one's GPUs alone."""
        import torch

        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return allowed.split(",") if allowed else [str(index) for index in range(torch.cuda.device_count())]


def threads_each(jobs: int) -> int:
    """Return the threads of each of ``jobs`` processes: one of them has as many as it would have from `dvc repro`."""
    import torch  # which must find the variables that run_stage sets

    return max(1, min(torch.get_num_threads(), usable_cores()) // jobs)


def _run_stage_module(stage: str, key: str, log: str, environment: dict[str, str]) -> None:
    """What ``python -m stages.train KEY > LOG`` would do, in this process."""
    os.setsid()  # an interrupt from the keyboard reaches it through its parent, once
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv[1:] = [key]
    runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
