"""One contestant in a process of its own: seconds to its first step, and its peak memory.

Neither can be measured beside others: the first contestant of a process imports the compiler for all
that follow, and memory that one has freed another uses again. ``measure`` starts
``python -m altgrad.benchmark.alone '<job as JSON>'`` and returns what that prints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from altgrad.config import run_stage

if TYPE_CHECKING:
    from altgrad.model import GPTConfig

# glibc maps every larger tensor by itself and unmaps it when it is freed, so resident memory is live memory.
# `settle_process` leaves it at that.
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
WARM_STEPS = 2  # after the first: memory that kernels keep for good is there then


def measure(
    config: GPTConfig, batch: int, name: str, formats: Sequence[str], *, device: str, threads: int, cache: Path
) -> dict[str, Any]:
    """Return ``first_step_s``, ``state_mb`` and ``peak_mb`` (None where it cannot be told) of one contestant.

    Args:
        config: the model's size.
        batch: sequences per step.
        name: one of ``steps.contestants``.
        formats: the formats that the contestants are made from.
        device: "cpu" or "cuda".
        threads: CPU threads.
        cache: a folder for compiled kernels; empty, the first step compiles them.

    Raises RuntimeError with the last lines of what the process said when it fails.
    """
    job = {
        "config": dataclasses.asdict(config), "batch": batch, "name": name, "formats": list(formats),
        "device": device, "threads": threads, "cache": str(cache),
    }  # fmt: skip
    return run_module("altgrad.benchmark.alone", job, f"{name}, width {config.width}, batch {batch}")


def cold_and_warm(first_step_in: Callable[[Path], float]) -> dict[str, Any]:
    """Return ``cold_s`` and ``warm_s``, from two new processes that share a compile cache, empty at first.

    ``first_step_in`` starts a process with the cache in the folder that it is given and returns the
    seconds from the call of the first step to its end, the compiler's own imports included: what is
    waited for, once the model is built.
    """
    with tempfile.TemporaryDirectory(prefix="altgrad-compile-") as folder:
        cold, warm = (first_step_in(Path(folder)) for _ in range(2))
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 1)}


def run_module(module: str, job: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the JSON that ``python -m module`` prints last for ``job``; freed tensors go back at once there.

    Raises RuntimeError, naming ``what`` was measured, with the last lines of what the process said when it fails.
    """
    command = [sys.executable, "-m", module, json.dumps(job)]
    done = subprocess.run(command, env=os.environ | ALLOCATION, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise RuntimeError(f"the process for {what} failed:\n{last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(arguments: list[str]) -> None:
    """Do the job in ``arguments`` and print its numbers as one line of JSON."""
    import torch  # after run_stage has set the variables that training runs under

    from altgrad.benchmark import memory, steps
    from altgrad.model import GPTConfig
    from altgrad.training import machine

    job = json.loads(arguments[0])
    machine.use_compile_cache(Path(job["cache"]))
    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    config = GPTConfig(**job["config"])
    entry = next(entry for entry in steps.contestants(job["formats"], device) if entry.name == job["name"])
    step = steps.Step(config, entry, steps.random_tokens(config, job["batch"], device), device)
    first = step.seconds()
    for _ in range(WARM_STEPS):
        step()
    peak = memory.peak_mb(step)
    numbers = {"first_step_s": first, "state_mb": memory.state_mb(step), "peak_mb": peak}
    print(json.dumps({key: value if value is None else round(value, 2) for key, value in numbers.items()}))


if __name__ == "__main__":
    run_stage(main)
