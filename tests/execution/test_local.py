"""The processes of the pool: how many, on which GPUs, and what becomes of one that fails, dies or grows.

Oracles: sums by hand; stages of the test's own, which say which process they ran in. GPUs are made up.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from altgrad.common.files import write_json
from altgrad.common.machine import GPU_SHARE
from altgrad.execution import Outcome, Task
from altgrad.execution.local import CONTEXT_MB, GROWTH, MARGIN, LocalPool, measured_mb
from altgrad.execution.progress import why_it_failed
from altgrad.training import machine
from tests.pipeline.conftest import environment


@pytest.mark.parametrize(
    ("cores", "gpus", "jobs", "threads", "each", "expected"),
    [(2, 0, None, 1, 1, 2), (8, 0, None, 2, 1, 4), (2, 0, None, 4, 1, 1), (2, 0, 7, 1, 1, 7),
     (10**6, 0, None, 1, 1, 64), (2, 4, None, 1, 1, 4), (2, 4, 1, 1, 1, 1),
     (2, 4, None, 2, 2, 2), (2, 5, None, 4, 4, 1)],
)  # fmt: skip
def test_jobs_are_what_the_machine_has_cores_or_gpus_for(cores, gpus, jobs, threads, each, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("altgrad.execution.local.usable_cores", lambda: 64)
    monkeypatch.setattr("torch.get_num_threads", lambda: cores)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert LocalPool(jobs, threads, each).jobs == expected


def test_no_process_is_forked_where_there_are_gpus(monkeypatch):
    """Torch's compiler, which the others are forked from, asks CUDA for its devices: after that no fork may use it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, method in ((0, "forkserver"), (1, "spawn")):
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        assert LocalPool(1).context.get_start_method() == method


# Writes down the process that it ran in, then does what the key says.
STAGE = f"""
import os, signal, sys
from pathlib import Path

key = sys.argv[1]
assert signal.getsignal(signal.SIGTERM).__module__ == "altgrad.execution.local", "the last task's is still there"
signal.signal(signal.SIGTERM, lambda *_: None)
with open("ran", "a") as file:
    file.write(f"{{key}} {{os.getpid()}}\\n")
if key.startswith("crashes"):
    os.kill(os.getpid(), signal.SIGSEGV)
if key.startswith("raises"):
    raise RuntimeError("a bug")
if key.startswith("grows"):
    sys.kept = [bytearray(os.urandom(1 << 20) * {(GROWTH >> 20) + 64})]
"""


DRIVER = """
import json, sys, time
from altgrad.execution import local
from altgrad.execution import LOGS, Task

if __name__ == "__main__":
    import torch

    gpus, *keys = sys.argv[1:]
    torch.cuda.device_count = lambda: int(gpus)
    LOGS.mkdir(parents=True)
    local.LIBRARIES = []  # none is needed
    pool = local.LocalPool(1)
    pool.submit([Task("train", key, (), 1) for key in keys])
    found = []
    while len(found) < len(keys):
        found += [[outcome.task.key, outcome.status] for outcome in pool.poll().ended]
        time.sleep(0.02)
    print(json.dumps(found))
"""


ENDLESS = """
import os, time
from pathlib import Path

Path("pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_a_process_ends_with_the_one_that_gives_it_tasks_however_that_ends(gpus: str, tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/__init__.py").touch()
    (tmp_path / "stages/train.py").write_text(ENDLESS)
    (tmp_path / "driver.py").write_text(DRIVER)
    with subprocess.Popen([sys.executable, "driver.py", gpus, "a"], cwd=tmp_path, env=environment()) as driver:
        pid = tmp_path / "pid"
        wait_until(lambda: pid.exists() and pid.read_text() != "")
        worker = Path("/proc") / pid.read_text()
        driver.kill()
    wait_until(lambda: not worker.exists())


def wait_until(there: Callable[[], bool]) -> None:
    for _ in range(600):
        if there():
            return
        time.sleep(0.1)
    pytest.fail("nothing for a minute")


@pytest.fixture(scope="module", params=["0", "1"], ids=["without GPUs", "with one"])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, int], dict[str, str], Path]:
    """Return the exit status of each of some tasks, the process that each ran in, and their folder."""
    folder = tmp_path_factory.mktemp("pool")
    (folder / "stages").mkdir()
    (folder / "stages/__init__.py").touch()
    (folder / "stages/train.py").write_text(STAGE)
    (folder / "driver.py").write_text(DRIVER)
    keys = ["first", "second", "crashes", "third", "raises", "fourth", "grows", "fifth", "sixth"]
    command = [sys.executable, "driver.py", request.param, *keys]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(done.stdout)
    assert [key for key, _ in found] == keys, "one after the other, each once"
    processes = dict(line.split() for line in (folder / "ran").read_text().splitlines())
    return dict(found), processes, folder


def test_a_task_that_fails_dies_or_grows_is_the_last_of_its_process_and_the_others_go_on(ran):
    status, process, _ = ran
    assert process["first"] == process["second"] and process["fifth"] == process["sixth"]
    for last, following in (("crashes", "third"), ("raises", "fourth"), ("grows", "fifth")):
        assert process[last] != process[following]
    assert process["third"] == process["raises"] and process["fourth"] == process["grows"]
    expected = {"crashes": -signal.SIGSEGV, "raises": 1}
    assert status == dict.fromkeys(status, 0) | expected


def test_why_it_failed_is_said_and_no_process_outlives_the_pool(ran, monkeypatch):
    status, process, folder = ran
    monkeypatch.chdir(folder)
    said = {key: why_it_failed(Outcome(Task("train", key, (), 1), status[key])) for key in ("crashes", "raises")}
    assert said == {"crashes": "its process was ended by SIGSEGV", "raises": "RuntimeError: a bug"}
    for pid in set(process.values()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


MODEL = {"layers": 4, "width": 128}


def cell(key: str, peak: float | None, device: str = "cuda", batch: int = 16, **model: int) -> None:
    write_json(Path(f"data/grid/{key}.json"), {"model": MODEL | {"start": None} | model, "train": {"batch": batch}})
    if peak is not None:
        write_json(Path(f"data/runs/{key}/timing.json"), {"device": device, "peak_memory_mb": peak})


def test_what_cells_of_this_model_and_batch_took_on_a_gpu_counts_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert measured_mb(MODEL, 16) is None
    cell("a", 900.0)
    cell("b", 1200.0)
    cell("not-run", None)
    cell("on-cpu", 5000.0, device="cpu")
    cell("wider", 5000.0, width=256)
    cell("larger-batch", 5000.0, batch=32)
    write_json(Path("data/grid/index.json"), {"cells": []})
    assert measured_mb(MODEL, 16) == 1200.0
    assert measured_mb(MODEL | {"layers": 8}, 16) is None


@pytest.mark.parametrize(
    ("gpus", "each", "threads", "cell_mb", "jobs", "share"),
    [(2, 1, 1, 1000.0, 8, "0.25"), (2, 1, 4, 1000.0, 4, "0.5"), (2, 1, 1, None, 2, None), (2, 2, 1, 1000.0, 1, None)],
)
def test_cells_share_gpus_that_hold_them_and_cores_that_feed_them(
    gpus, each, threads, cell_mb, jobs, share, monkeypatch
):
    total = SimpleNamespace(total_memory=4.2 * (MARGIN * 1000 + CONTEXT_MB) * 1e6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("altgrad.execution.local.usable_cores", lambda: 16)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: total)
    started = []
    monkeypatch.setattr("altgrad.execution.local._Worker", lambda _, environment: started.append(environment))
    pool = LocalPool(None, threads, each, cell_mb)
    assert pool.jobs == jobs
    for slot in range(jobs):
        pool._worker(slot)
    assert [environment.get(GPU_SHARE) for environment in started] == [share] * jobs
    seen = [environment["CUDA_VISIBLE_DEVICES"] for environment in started]
    wanted = ["0,1"] if each == 2 else ["0", "1"] * (jobs // 2)
    assert seen == wanted


def test_a_process_is_held_to_its_part_of_a_gpu_it_shares(monkeypatch):
    held = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: held.append(given))
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    machine.keep_to_share(cuda)
    monkeypatch.setenv(GPU_SHARE, "0.25")
    machine.keep_to_share(cpu)
    machine.keep_to_share(cuda)
    assert held == [(0.25,)]
