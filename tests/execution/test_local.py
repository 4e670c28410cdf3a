"""The processes of the pool: how many there are, and what becomes of one that fails, dies or grows.

Oracle: stages of one's own, which say which process they ran in.
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
from typing import Any

import pytest

from altgrad.execution.executor import Outcome, Task
from altgrad.execution.local import GROWTH, LocalPool
from altgrad.execution.progress import why_it_failed
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
from altgrad.execution.executor import LOGS, Task

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


def test_a_process_goes_on_after_a_task_that_ended_well(ran):
    _, process, _ = ran
    assert process["first"] == process["second"] and process["fifth"] == process["sixth"]


def test_one_that_fails_dies_or_grows_is_the_last_of_its_process_and_the_others_go_on(ran):
    status, process, _ = ran
    for last, following in (("crashes", "third"), ("raises", "fourth"), ("grows", "fifth")):
        assert process[last] != process[following]
    assert process["third"] == process["raises"] and process["fourth"] == process["grows"]
    expected = {"crashes": -signal.SIGSEGV, "raises": 1}
    assert status == dict.fromkeys(status, 0) | expected


def test_why_it_failed_is_said(ran, monkeypatch):
    status, _, folder = ran
    monkeypatch.chdir(folder)
    said = {key: why_it_failed(Outcome(Task("train", key, (), 1), status[key])) for key in ("crashes", "raises")}
    assert said == {"crashes": "its process was ended by SIGSEGV", "raises": "RuntimeError: a bug"}


def test_no_process_outlives_the_pool(ran):
    _, process, _ = ran
    for pid in set(process.values()):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
