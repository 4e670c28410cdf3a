"""How a command ends, what its process is told before torch is loaded, and how files are written.

Oracle: the process, from outside. A command that is stopped ends in one sentence and status 128 + signal.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from altgrad.common.console import INTERRUPTED, STOPS, handled
from altgrad.common.errors import did_you_mean, near_matches, run_stage
from altgrad.common.files import canonical_json, replacing, write_text
from altgrad.common.fingerprint import discard_finished, mark_finished

ROOT = Path(__file__).parents[2]
READY = "print('ready', flush=True)\n"
SLEEP = f"import time\n    {READY}    time.sleep(60)"
RUN = "from altgrad.common.console import STOPS\nfrom altgrad.common.errors import run_stage\n"
WAITING = f"{RUN}def main(_):\n    {SLEEP}\nrun_stage(main, stops=STOPS)"
LOADING = f"from altgrad.common.console import end_when_stopped\nend_when_stopped()\nif True:\n    {SLEEP}"
FORKING = f"""{RUN}import multiprocessing
def main(_):
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.map(abs, range(4))
    {SLEEP}
run_stage(main)
"""
FAULTS_OF_FRESH_TENSORS = """
import resource
from altgrad.common.errors import run_stage

def main(arguments):
    import torch
    torch.set_num_threads(1)
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = lambda: [torch.ones(n) for n in (5_000_000, 50_000, 2_000_000, 500_000)]
    for _ in range(4):
        step()
    before = faults()
    for _ in range(10):
        step()
    print(faults() - before)

run_stage(main)
"""
THREADS = f"{RUN}import os\nrun_stage(lambda _: print(*map(os.environ.get, ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT'))))"


def stopped(code: str, signum: signal.Signals, **variables: str) -> tuple[int, str]:
    """Return status and errors of a process that was sent ``signum`` when it was ready, as its whole group."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    time.sleep(0.05)
    (os.killpg if signum == signal.SIGINT else os.kill)(process.pid, signum)
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def printed(code: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.parametrize(("code", "signum", "variables", "said"), [
    *((code, signum, {}, f"{INTERRUPTED}\n") for code in (WAITING, LOADING) for signum in STOPS),
    (FORKING, signal.SIGINT, {}, f"{INTERRUPTED}\n"),  # reaches the pool through its parent alone
    (WAITING, signal.SIGINT, {"DVC_STAGE": "report"}, ""),  # whoever runs DVC says it
])  # fmt: skip
def test_a_stop_is_one_sentence_and_its_own_status(code, signum, variables, said):
    assert stopped(code, signum, **variables) == (128 + signum, said)


def test_a_handler_goes_when_its_work_ends_in_whatever_way():
    before, seen = [signal.getsignal(signum) for signum in STOPS], []
    with pytest.raises(ZeroDivisionError), handled(lambda signum, _: seen.append(signum)):
        for signum in STOPS:
            signal.raise_signal(signum)
        raise ZeroDivisionError
    assert seen == list(STOPS) and [signal.getsignal(signum) for signum in STOPS] == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_sentence_and_a_defect_keeps_its_traceback(monkeypatch, code):
    monkeypatch.setattr(sys, "argv", ["stage"])
    full = OSError(code, "No space left on device", "data/runs/model.safetensors")
    with pytest.raises(SystemExit, match="^error: the disk is full while writing data/runs/model.safetensors; .*$"):
        run_stage(lambda _: (_ for _ in ()).throw(full))
    with pytest.raises(ZeroDivisionError):
        run_stage(lambda _: 1 / 0)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults_unless_the_user_says_otherwise():
    own = {"MALLOC_TRIM_THRESHOLD_": "1000000", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    assert int(printed(FAULTS_OF_FRESH_TENSORS, dict(os.environ))) < 500
    assert int(printed(FAULTS_OF_FRESH_TENSORS, os.environ | own)) > 10_000


@pytest.mark.parametrize(("own", "said"), [({}, "PASSIVE 2000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None")])
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(own, said):
    others = {key: v for key, v in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    assert printed(THREADS, others | own).strip() == said


def test_near_matches_ignore_case():
    assert did_you_mean("e4m3", ["E4M3", "E5M2"]).startswith("; did you mean E4M3")
    assert [did_you_mean("zzz", *rest) for rest in ((["E4M3"],), ([],), (["E4M3"], "; read on"))] == [
        "; known: E4M3", "", "; read on",
    ]  # fmt: skip
    assert near_matches(" E4M3 ", ["E5M2", "E4M3", "E4M2", "E4M1", "UE4M3"])[0] == "E4M3"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_canonical_json_depends_on_values_alone_and_refuses_what_json_cannot_hold():
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1})
    with pytest.raises(ValueError):
        canonical_json({"loss": float("nan")})


def test_a_finished_cell_takes_no_folder_of_a_further_models_cell_with_it(tmp_path):
    own, other = (tmp_path / "scratch" / f"E4M3-adamw-0-1{end}-{'0a' * 8}" for end in ("", "-nano"))
    for folder in (own, other):
        folder.mkdir(parents=True)
        mark_finished(folder)
    discard_finished(tmp_path, "E4M3-adamw-0-1")
    assert not own.exists() and other.exists()
    discard_finished(tmp_path)
    assert not other.exists()
