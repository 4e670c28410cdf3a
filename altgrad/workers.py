"""Several cells at once: ``make repro JOBS=4``, or ``python -m altgrad.workers --jobs 4``.

`dvc repro` runs one stage at a time under a lock of its own. So the cells that it would have to train are
trained ahead of it, each by the very command of its stage in a process of its own, and every finished one
is handed to DVC with `dvc commit`. What DVC has cached is left to it. The bits of a cell do not depend
on its neighbours; they may depend on the number of threads, which is the cores divided by the jobs
unless ``train.threads`` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from altgrad.config import UserError, run_stage

POLL_SECONDS = 0.5
LOGS = Path("scratch/workers")
_STEPS_DONE = re.compile(rb" (\d+)/\d+ \[")


class Worker(NamedTuple):
    """A cell in training."""

    key: str
    slot: int
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        """What the process prints."""
        return LOGS / f"{self.key}.log"

    def steps_done(self) -> int:
        """Return the step that the progress bar in the log last showed."""
        found = _STEPS_DONE.findall(self.log.read_bytes()[-4096:])
        return int(found[-1]) if found else 0

    def last_line(self) -> str:
        """Return the last line of the log, which names the mistake if there was one."""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def pending_cells() -> list[str]:
    """Return the keys of the cells that `dvc repro` would train: neither up to date nor in the run cache."""
    from dvc.repo import Repo
    from dvc.stage.cache import RunCacheNotFoundError

    pending = []
    with Repo() as repo, repo.lock:
        for stage in repo.index.stages:
            if not getattr(stage, "name", "").startswith("train@") or not stage.changed():
                continue
            stage.save_deps()
            try:
                repo.stage_cache.restore(stage, dry=True)
            except RunCacheNotFoundError:
                pending.append(stage.name.partition("@")[2])
    return pending


def train_cells(keys: list[str], jobs: int) -> dict[str, str]:
    """Train the cells, ``jobs`` at a time; return what went wrong, by key.

    An interrupt or SIGTERM reaches every cell, which writes a checkpoint and stops; then this process
    ends with status 128 + signal.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    steps = {key: json.loads(Path(f"data/grid/{key}.json").read_text())["train"]["steps"] for key in keys}
    from altgrad.training import machine  # imports torch, which must find the variables that run_stage sets

    threads, gpus = max(1, machine.usable_cores() // jobs), _gpus()
    waiting, running, failures, done, forwarded = list(keys), [], {}, 0, 0
    with _caught_signals() as received, tqdm(total=sum(steps.values()), unit="step", unit_scale=True) as bar:
        while running or (waiting and not received):
            while waiting and len(running) < jobs and not received:
                slot = min(set(range(jobs)) - {worker.slot for worker in running})
                running.append(_start(waiting.pop(0), slot, threads, gpus))
            time.sleep(POLL_SECONDS)
            for worker in [worker for worker in running if worker.process.poll() is not None]:
                running.remove(worker)
                done += steps[worker.key]
                if received:
                    continue
                problem = worker.last_line() if worker.process.returncode else _hand_to_dvc(worker.key)
                if problem:
                    failures[worker.key] = f"{problem} (its output is in {worker.log})"
            bar.n = done + sum(worker.steps_done() for worker in running)
            bar.set_description(f"{len(keys) - len(waiting) - len(running)}/{len(keys)} cells")
            bar.set_postfix_str(" ".join(worker.key for worker in running))
            for signum in received[forwarded:]:
                forwarded += 1
                for worker in running:
                    worker.process.send_signal(signum)
    if received:
        print("interrupted; the checkpoints are saved, run the same command to resume", file=sys.stderr)
        sys.exit(128 + received[0])
    return failures


def _start(key: str, slot: int, threads: int, gpus: list[str]) -> Worker:
    out = Path("data/runs") / key
    if out.exists():  # as DVC does; what a resumed cell needs is in its scratch directory
        shutil.rmtree(out)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    with open(LOGS / f"{key}.log", "wb") as log:
        command = [sys.executable, "-m", "stages.train", key]
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    return Worker(key, slot, process)


def _gpus() -> list[str]:
    """Return what ``CUDA_VISIBLE_DEVICES`` must be for a process to see each of this one's GPUs alone."""
    import torch

    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return allowed.split(",") if allowed else [str(index) for index in range(torch.cuda.device_count())]


def _hand_to_dvc(key: str) -> str | None:
    done = subprocess.run(["dvc", "commit", "--quiet", "--force", f"train@{key}"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"dvc commit: {done.stderr.strip()}"


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


def main(arguments: list[str]) -> None:
    """Train what `dvc repro` would train, several cells at a time."""
    parser = argparse.ArgumentParser(prog="python -m altgrad.workers", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells at a time")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        raise UserError(f"--jobs: expected 1 or more, got {options.jobs}")
    if subprocess.run(["dvc", "repro", "--quiet", "tokenize", "grid"]).returncode:
        sys.exit(1)
    keys = pending_cells()
    failures = train_cells(keys, options.jobs) if keys else {}
    if failures:
        raise UserError("; ".join(f"{key}: {problem}" for key, problem in failures.items()))


if __name__ == "__main__":
    run_stage(main)
