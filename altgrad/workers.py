"""The cells of a grid, several at once: ``make repro JOBS=4``, or ``python -m altgrad.workers --jobs 4``.

`dvc repro` runs one stage at a time under a lock of its own and writes all of dvc.lock anew after each. So the cells
that it would train or diagnose are done ahead of it, each by the very module of its stage in a process of its own,
and the finished ones are handed to DVC many at a time. What DVC has cached is taken from there. The bits of a
cell do not depend on its neighbours; they may depend on the number of threads, which is the cores divided by the
jobs unless ``train.threads`` says otherwise.

The processes are forked from one that has loaded the libraries and none of this project, which every process loads
for itself: that takes a third of the time of a small cell.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from altgrad.config import UserError, load_params, run_stage

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.stage import Stage

POLL_SECONDS = 0.1
SHOWN_EVERY = {True: 0.5, False: 30}  # seconds, by whether someone watches or the output is a file
# Every hand-over reads and writes the whole of dvc.lock, so that it takes longer the more cells there are.
HANDED_OVER_EVERY, TIMES_AS_LONG = 20, 10  # seconds, and as a multiple of what the last one took
LOGS = Path("scratch/workers")
LIBRARIES = ["torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "pandas", "pyarrow.parquet"]
_STEPS_DONE = re.compile(rb" (\d+)/\d+ \[")


class Task(NamedTuple):
    """A stage of a cell that has to run."""

    stage: str  # train or diagnose
    key: str
    deps: tuple[str, ...]  # hashes of what it depends on

    @property
    def name(self) -> str:
        """DVC's name of the stage."""
        return f"{self.stage}@{self.key}"

    @property
    def log(self) -> Path:
        """What the process prints."""
        return LOGS / f"{self.name}.log"

    def size(self) -> int:
        """Return the steps to be trained, or 1."""
        if self.stage != "train":
            return 1
        return json.loads(Path(f"data/grid/{self.key}.json").read_text())["train"]["steps"]

    def steps_done(self) -> int:
        """Return the step that the progress bar in the log last showed."""
        found = _STEPS_DONE.findall(self.log.read_bytes()[-4096:]) if self.log.exists() else []
        return int(found[-1]) if found else 0

    def last_line(self) -> str:
        """Return the last line of the log, which names the mistake if there was one."""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


class Worker(NamedTuple):
    """A task in a process."""

    task: Task
    slot: int
    process: BaseProcess


# --- what is left to do, and what is done ----------------------------------------------------------------


def pending(stage: str) -> list[Task]:
    """Return what `dvc repro` would run of ``stage``; what it would take from the run cache is taken from it now."""
    from dvc.stage.cache import RunCacheNotFoundError

    tasks, restored = [], []
    with _locked_repo() as repo:
        for found in _stages(repo, stage):
            if not found.changed():
                continue
            found.remove_outs()  # what a resumed cell needs is in its scratch directory
            try:
                repo.stage_cache.restore(found)
            except RunCacheNotFoundError:
                found.save_deps()  # not sooner: a new hash of what it needs would make its old outputs look new
                tasks.append(Task(stage, found.name.partition("@")[2], _hashes(found)))
            else:
                _save(found)
                restored.append(found)
        _write_lock_file(restored)
    return tasks


def hand_to_dvc(tasks: list[Task]) -> dict[str, str]:
    """Put what finished tasks of one stage wrote into DVC's cache and lock file; return what went wrong, by name."""
    from dvc.exceptions import DvcException

    started, failures, saved = {task.name: task for task in tasks}, {}, []
    with _locked_repo() as repo:
        for found in _stages(repo, tasks[0].stage):
            if found.name not in started:
                continue
            found.save_deps()
            if _hashes(found) != started[found.name].deps:
                failures[found.name] = "what it depends on has changed meanwhile; run the same command again"
                continue
            try:
                _save(found)
                saved.append(found)
            except DvcException as error:
                failures[found.name] = str(error)
        _write_lock_file(saved)
    return failures


@contextmanager
def _locked_repo() -> Iterator[Repo]:
    from dvc.lock import LockError
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.WARNING)  # it would say of every stage that it is cached
    try:
        with Repo() as repo, repo.lock:
            yield repo
    except LockError:
        raise UserError(
            "another DVC command holds this project's lock; wait for it and run the same command again, finished cells "
            "are kept"
        ) from None


def _stages(repo: Repo, stage: str) -> list[Stage]:
    return [found for found in repo.index.stages if getattr(found, "name", "").startswith(f"{stage}@")]


def _hashes(stage: Stage) -> tuple[str, ...]:
    return tuple(str(dep.hash_info) for dep in stage.deps)


def _save(stage: Stage) -> None:
    stage.save()
    stage.commit()


def _write_lock_file(stages: list[Stage]) -> None:
    if stages:
        stages[0].dvcfile.dump_stages(stages, update_pipeline=False)


# --- doing it --------------------------------------------------------------------------------------------


def run_tasks(tasks: list[Task], jobs: int) -> dict[str, str]:
    """Run tasks of one stage, ``jobs`` at a time; return what went wrong, by name.

    An interrupt or SIGTERM reaches every process, which writes a checkpoint and stops; then this process
    ends with status 128 + signal.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = str(threads_each(jobs))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    gpus, unit = _gpus(), "step" if tasks[0].stage == "train" else "cell"
    waiting, running, finished, failures, done, forwarded = list(tasks), [], [], {}, 0, 0
    handed_over, took, shown = time.monotonic(), 0.0, 0.0
    with _caught_signals() as received, tqdm(total=sum(t.size() for t in tasks), unit=unit, unit_scale=True) as bar:
        while running or finished or (waiting and not received):
            while waiting and len(running) < jobs and not received:
                slot = min(set(range(jobs)) - {worker.slot for worker in running})
                running.append(_start(context, waiting.pop(0), slot, gpus))
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in running if not worker.process.is_alive()]:
                running.remove(worker)
                done += worker.task.size()
                if worker.process.exitcode == 0:
                    finished.append(worker.task)
                elif not received:
                    failures[worker.task.name] = worker.task.last_line()
            if not running or time.monotonic() - shown > SHOWN_EVERY[sys.stderr.isatty()]:
                shown = time.monotonic()
                bar.n = done + sum(worker.task.steps_done() for worker in running if unit == "step")
                cells = f"{tasks[0].stage} {len(tasks) - len(waiting) - len(running)}/{len(tasks)}"
                bar.set_description(cells, refresh=False)
                bar.set_postfix_str(" ".join(worker.task.key for worker in running), refresh=False)
                bar.refresh()
            for signum in received[forwarded:]:
                forwarded += 1
                for worker in running:
                    os.kill(worker.process.pid, signum)
            last, since = not running and (received or not waiting), time.monotonic() - handed_over
            if finished and (last or since > max(HANDED_OVER_EVERY, TIMES_AS_LONG * took)):
                began = time.monotonic()
                failures |= hand_to_dvc(finished)
                finished, handed_over = [], time.monotonic()
                took = handed_over - began
    if received:
        print("interrupted; the checkpoints are saved, run the same command to resume", file=sys.stderr)
        sys.exit(128 + received[0])
    return {name: f"{problem} (its output is in {LOGS / name}.log)" for name, problem in failures.items()}


def threads_each(jobs: int) -> int:
    """Return the threads of each of ``jobs`` processes: one of them has as many as it would have from `dvc repro`."""
    import torch  # which must find the variables that run_stage sets

    from altgrad.training import machine

    return max(1, min(torch.get_num_threads(), machine.usable_cores()) // jobs)


def _start(context: Any, task: Task, slot: int, gpus: list[str]) -> Worker:
    task.log.unlink(missing_ok=True)
    environment = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
    process = context.Process(target=_run_stage_module, args=(task.stage, task.key, str(task.log), environment))
    process.start()
    return Worker(task, slot, process)


def _run_stage_module(stage: str, key: str, log: str, environment: dict[str, str]) -> None:
    """What ``python -m stages.train KEY > LOG`` would do, in this process."""
    os.setsid()  # an interrupt from the keyboard reaches it through its parent, once
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    sys.argv[1:] = [key]
    runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)


def _gpus() -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` must be for a process to see each of this one's GPUs alone."""
    import torch

    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return allowed.split(",") if allowed else [str(index) for index in range(torch.cuda.device_count())]


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect interrupts instead of being stopped by them."""
    received: list[int] = []
    caught = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(signum, lambda signum, frame: received.append(signum)) for signum in caught]
    try:
        yield received
    finally:
        for signum, handler in zip(caught, before, strict=True):
            signal.signal(signum, handler)


def change_params(path: Path, settings: list[str]) -> None:
    """Write settings such as ``grid.seeds=[0,1,2]``, in Hydra's grammar, into ``path``."""
    from dvc.exceptions import InvalidArgumentError
    from dvc.utils.hydra import apply_overrides

    try:
        if settings:
            apply_overrides(path, settings)
    except InvalidArgumentError as error:
        why = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"-S: {why}; params.yaml is as it was") from None


def main(arguments: list[str]) -> None:
    """Run what `dvc repro` would run of the cells, several at a time."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.workers", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time")
    parser.add_argument(
        "-S", "--set-param", action="append", default=[], metavar="NAME=VALUE",
        help="write a setting into params.yaml first, as `dvc exp run -S` does; may be given many times",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        raise UserError(f"--jobs: expected 1 or more, got {options.jobs}")
    change_params(Path("params.yaml"), options.set_param)
    load_params()
    if subprocess.run(["dvc", "repro", "--quiet", "tokenize", "grid"], check=False).returncode:
        sys.exit(1)
    for stage in ("train", "diagnose"):
        tasks = pending(stage)
        failures = run_tasks(tasks, options.jobs) if tasks else {}
        if failures:
            raise UserError("; ".join(f"{name}: {problem}" for name, problem in failures.items()))


if __name__ == "__main__":
    run_stage(main)
