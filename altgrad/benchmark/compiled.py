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
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from altgrad.common.errors import run_stage

if TYPE_CHECKING:
    from altgrad.model import GPTConfig

AT_A_TIME = 6
POLL_S = 0.2


def compile_all(
    names: Sequence[str], config: GPTConfig, batch: int, cache: Path, at_a_time: int = AT_A_TIME
) -> dict[str, str]:
    """Compile the steps of the contestants ``names`` of `steps.contestants` into ``cache``.

    Returns those whose process failed, with the last line of what it said: the session takes such a step itself.
    """
    waiting, failed = list(names), {}
    running: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    name = waiting.pop(0)
                    job = {"name": name, "config": dataclasses.asdict(config), "batch": batch, "cache": str(cache)}
                    command = [sys.executable, "-m", "altgrad.benchmark.compiled", json.dumps(job)]
                    quiet = subprocess.DEVNULL
                    with _errors(folder, name).open("wb") as errors:
                        running[name] = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=errors)
                time.sleep(POLL_S)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    if running.pop(name).returncode:
                        said = _errors(folder, name).read_text(errors="replace")
                        failed[name] = (said.strip() or "killed").splitlines()[-1]
        finally:
            for process in running.values():
                process.kill()
    return failed


def _errors(folder: str, name: str) -> Path:
    return Path(folder, name.replace("/", "_"))


def main(arguments: list[str]) -> None:
    """Take one step of the job in ``arguments``."""
    from altgrad.benchmark import steps
    from altgrad.model import GPTConfig
    from altgrad.model.hardware import select_device
    from altgrad.training import machine

    job = json.loads(arguments[0])
    machine.use_compile_cache(Path(job["cache"]))
    device = select_device("auto")
    config = GPTConfig(**job["config"] | {"labels": tuple(job["config"]["labels"])})  # JSON has no tuples
    entry = {entry.name: entry for entry in steps.contestants(device)}[job["name"]]
    steps.Step(config, entry, steps.random_tokens(config, job["batch"], device), device)()


if __name__ == "__main__":
    run_stage(main)
