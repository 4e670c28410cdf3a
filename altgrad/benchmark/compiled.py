"""Graphs of training steps made beforehand, several at a time: ``python -m altgrad.benchmark.compiled JOB``.

Compiling a step of twelve layers takes a process a minute, most of it on one core, and a list of ten minutes has ten of
them. So processes of their own compile them into the cache on disk, where the session finds them. One that has no room
on the GPU to take its step has compiled it by then.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from altgrad.config import run_stage

if TYPE_CHECKING:
    from altgrad.model import GPTConfig

AT_A_TIME = 6
POLL_S = 0.2


def compile_all(names: Sequence[str], config: GPTConfig, batch: int, cache: Path, at_a_time: int = AT_A_TIME) -> None:
    """Compile the steps of the contestants ``names`` of `steps.contestants` into ``cache``.

    What fails says why when the session takes the step itself.
    """
    waiting = list(names)
    running: list[subprocess.Popen[bytes]] = []
    quiet = subprocess.DEVNULL
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                sizes = {"config": dataclasses.asdict(config), "batch": batch, "cache": str(cache)}
                job = {"name": waiting.pop(0), **sizes}
                command = [sys.executable, "-m", "altgrad.benchmark.compiled", json.dumps(job)]
                running.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet))
            time.sleep(POLL_S)
            running = [process for process in running if process.poll() is None]
    finally:
        for process in running:
            process.kill()


def main(arguments: list[str]) -> None:
    """Take one step of the job in ``arguments``."""
    from altgrad.benchmark import steps
    from altgrad.model import GPTConfig
    from altgrad.training import machine

    job = json.loads(arguments[0])
    machine.use_compile_cache(Path(job["cache"]))
    device = machine.select_device("auto")
    config = GPTConfig(**job["config"])
    entry = next(entry for entry in steps.contestants(device) if entry.name == job["name"])
    steps.Step(config, entry, steps.random_tokens(config, job["batch"], device), device)()


if __name__ == "__main__":
    run_stage(main)
