"""The executor of one machine: processes that each run one task after another.

Loading the libraries, this project and a compiled graph takes longer than a small cell trains, so a process keeps them
for the next cell. Signal handlers, output and memory are reset after each task. A process is replaced if its task
fails, if it dies, or if it keeps much more memory than after its first task.

Processes are forked from a server process that has loaded the libraries and nothing of this project. On a machine with
GPUs, each process is started afresh and sees only the GPUs of its tasks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

from altgrad.common.files import read_json
from altgrad.common.machine import GPU_SHARE, usable_cores
from altgrad.execution import Outcome, Status, Task

LIBRARIES = ["torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "pandas", "pyarrow.parquet"]
GROWTH = 1 << 30  # bytes by which a process may grow after its first task; a graph has some 100 MB

# Memory of a cell on a shared GPU: a factor for fragmentation in torch's allocator, and MB for CUDA itself.
MARGIN, CONTEXT_MB = 1.25, 600.0


class LocalPool:
    """Runs up to ``jobs`` tasks at a time on this machine; diagnoses first, since they are short and wanted soon.

    ``threads`` and ``gpus`` are counts for each task. With ``jobs=None``, the machine's GPUs set the number, or its
    cores if it has no GPU. Tasks share a GPU if its memory holds several of ``cell_mb`` (MB) and there are cores for
    them. Each is then limited to its share of the memory. No library or process is loaded before the first task.
    """

    def __init__(self, jobs: int | None = None, threads: int = 1, gpus: int = 1, cell_mb: float | None = None) -> None:
        self._wanted, self._threads, self._gpus_each, self._cell_mb = jobs, threads, gpus, cell_mb
        self._waiting: deque[Task] = deque()
        self._workers: dict[int, _Worker] = {}  # by slot
        self._leaving: list[_Worker] = []  # told to end

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue ``tasks``: diagnoses before trainings, and behind the waiting tasks of the same stage."""
        self._waiting = deque(sorted([*self._waiting, *tasks], key=lambda task: task.stage != "diagnose"))

    def poll(self) -> Status:
        """Collect ended tasks from the processes, and give idle processes their next task."""
        outcomes = [outcome for worker in self._workers.values() if (outcome := worker.outcome())]
        fit = {slot: worker for slot, worker in self._workers.items() if worker.is_fit()}
        self._leaving += [worker for slot, worker in self._workers.items() if slot not in fit]
        self._workers = fit
        while self._waiting and (free := self._free()) is not None:
            self._worker(free).give(self._waiting.popleft())
        return Status([worker.task for worker in self._workers.values() if worker.task], outcomes)

    def cancel(self, signum: int, only: Collection[str] | None = None) -> None:
        if only is None:
            self._waiting.clear()
        for worker in self._workers.values():
            if worker.task and (only is None or worker.task.name in only):
                worker.signal(signum)

    def close(self) -> None:
        """End the processes and wait until they are gone; a process that trains writes a checkpoint first."""
        for worker in (*self._workers.values(), *self._leaving):
            worker.close()
        self._workers, self._leaving = {}, []

    def _free(self) -> int | None:
        """Return the number of a slot with an idle process, else of one without a process; None if all are busy."""
        idle = [slot for slot, worker in self._workers.items() if worker.task is None]
        return next(iter([*idle, *(slot for slot in range(self.jobs) if slot not in self._workers)]), None)

    def _worker(self, slot: int) -> _Worker:
        if slot not in self._workers:
            first, there = slot * self._gpus_each, self._gpus
            gpus = [there[(first + i) % len(there)] for i in range(self._gpus_each)] if there else []
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
            if gpus and self._sharing > 1:
                environment[GPU_SHARE] = str(1 / self._sharing)
            self._workers[slot] = _Worker(self.context, environment)
        return self._workers[slot]

    @cached_property
    def jobs(self) -> int:
        import torch  # which counts physical cores, or what OMP_NUM_THREADS says

        cores = min(torch.get_num_threads(), usable_cores())
        by_gpus = max(1, len(self._gpus) // self._gpus_each) * self._sharing if self._gpus else None
        return self._wanted or by_gpus or max(1, cores // self._threads)

    @cached_property
    def _sharing(self) -> int:
        if not self._gpus or self._gpus_each > 1 or self._cell_mb is None:
            return 1
        import torch

        total = min(torch.cuda.get_device_properties(i).total_memory for i in range(len(self._gpus))) / 1e6
        cores = usable_cores() // (self._threads * len(self._gpus))
        return max(1, min(cells_on(total, self._cell_mb), cores))

    @cached_property
    def context(self) -> ForkServerContext | SpawnContext:
        """The fork server; with GPUs ``spawn``, since CUDA fails in a fork of a process with torch's compiler."""
        if self._gpus:
            return multiprocessing.get_context("spawn")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        return context

    @cached_property
    def _gpus(self) -> list[str]:
        """The GPUs of this process: for each, the value of ``CUDA_VISIBLE_DEVICES`` that shows it alone."""
        import torch

        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        return allowed.split(",") if allowed else [str(index) for index in range(torch.cuda.device_count())]


def measured_mb(model: dict[str, Any], batch: int) -> float | None:
    """Return the highest peak GPU memory of the cells of this grid, in MB (10^6 bytes); None if none ran on a GPU.

    Only cells with the model settings ``model`` and ``train.batch`` equal to ``batch`` count.
    """
    peaks = []
    for path in Path("data/grid").glob("*.json"):
        timing = Path("data/runs") / path.stem / "timing.json"
        if timing.exists():
            cell, took = read_json(path), read_json(timing)
            same = model.items() <= cell["model"].items() and cell["train"]["batch"] == batch
            if took["device"] == "cuda" and same:
                peaks.append(took["peak_memory_mb"])
    return max(peaks, default=None)


def cells_on(total_mb: float, cell_mb: float | None) -> int:
    """Return how many cells of ``cell_mb`` MB fit on a GPU with ``total_mb``, at least 1; 1 if ``cell_mb`` is None."""
    return 1 if cell_mb is None else max(1, int(total_mb // (MARGIN * cell_mb + CONTEXT_MB)))


class _Worker:
    """A process of the pool, and the task that it runs."""

    def __init__(self, context: ForkServerContext | SpawnContext, environment: dict[str, str]) -> None:
        self.task: Task | None = None
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, environment), daemon=True)
        self._process.start()
        theirs.close()
        self._failed = self._stopping = False
        self._first_bytes = self._bytes = 0

    def give(self, task: Task) -> None:
        self.task = task
        with suppress(BrokenPipeError):  # the process has died; `outcome` returns that
            self._connection.send((task.stage, task.key, str(task.log)))

    def outcome(self) -> Outcome | None:
        if self.task is None:
            return None
        alive = self._process.is_alive()  # asked first: if the process is dead, its answer has arrived by now
        if alive and not self._connection.poll():
            return None
        try:
            if not self._connection.poll():
                raise EOFError
            status, self._bytes = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode
        self._first_bytes = self._first_bytes or self._bytes
        self._failed = status != 0
        ended, self.task = Outcome(self.task, status), None
        return ended

    def is_fit(self) -> bool:
        """Return whether to keep the process; an idle one that failed, died or grew by `GROWTH` is told to end."""
        fit = not self._failed and self._process.is_alive() and self._bytes <= self._first_bytes + GROWTH
        if not fit and self.task is None:
            self._connection.close()
        return fit or self.task is not None

    def close(self) -> None:
        self._connection.close()  # ends an idle process, which waits for a task
        if self.task is not None and not self._stopping:  # a second signal would end it before it has cleaned up
            self._process.terminate()
        self._process.join()

    def signal(self, signum: int) -> None:
        self._stopping = True
        assert self._process.pid is not None
        with suppress(ProcessLookupError):  # it has ended since the last poll
            os.kill(self._process.pid, signum)


def serve(connection: Connection, environment: dict[str, str]) -> None:
    """Run each task (stage, key, log) from ``connection``; send back its exit status and the bytes in use after it."""
    os.setsid()  # so that an interrupt from the keyboard comes from the parent alone, once
    os.environ.update(environment)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    # By default SIGTERM would end the process at once, with a warning about what it shares with its parent.
    signal.signal(signal.SIGTERM, _raise)
    try:
        first = True
        while True:
            try:
                stage, key, log = connection.recv()
            except EOFError:
                return
            status = _run(stage, key, log)
            gc.collect()  # a model, its optimizer and its graph refer to one another
            if first:
                gc.freeze()  # spares the libraries in later collections: 0.3 to 0.5 s, thirty small steps
                first = False
            connection.send((status, _resident_bytes()))
    except KeyboardInterrupt:  # between two tasks, or before the answer of one was sent
        sys.exit(128 + signal.SIGTERM)


def _stop_with_parent() -> None:
    """Wait until the process that gives tasks has ended, then send SIGTERM to this one: a cell writes a checkpoint.

    The fork server, from which this process was forked, does not end with that process: it outlives its forks.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on a system without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _raise(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(signum)


def _run(stage: str, key: str, log: str) -> int:
    """Do what ``python -m stages.train KEY > LOG`` would do, in this process; return its exit status."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = [key]
    try:
        runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        return 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
    except Exception:  # noqa: BLE001 - any error ends the task with status 1
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _raise)
    return 0
