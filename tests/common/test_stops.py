"""A command that is stopped ends in one sentence and status 128 + signal. Oracle: the process, from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from altgrad.common.console import INTERRUPTED, STOPS, handled

ROOT = Path(__file__).parents[2]
READY = "print('ready', flush=True)"
WAITING = f"""
import time
from altgrad.common.errors import run_stage
from altgrad.common.console import STOPS

def main(_):
    {READY}
    time.sleep(60)

run_stage(main, stops=STOPS)
"""
LOADING = f"""
from altgrad.common.console import end_when_stopped
end_when_stopped()
import time
{READY}
time.sleep(60)
"""
FORKING = f"""
import multiprocessing, os, time
from altgrad.common.errors import run_stage

def main(_):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(abs, range(4))
        {READY}
        time.sleep(60)

run_stage(main)
"""


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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("code", [WAITING, LOADING], ids=["at work", "loading modules"])
def test_a_stop_is_one_sentence_and_its_own_status(code, signum):
    assert stopped(code, signum) == (128 + signum, f"{INTERRUPTED}\n")


def test_an_interrupt_reaches_a_forked_pool_through_its_parent_alone():
    assert stopped(FORKING, signal.SIGINT) == (128 + signal.SIGINT, f"{INTERRUPTED}\n")
    assert stopped(FORKING, signal.SIGTERM) == (-signal.SIGTERM, "")


def test_a_stage_that_dvc_runs_leaves_the_sentence_to_whoever_runs_dvc():
    assert stopped(WAITING, signal.SIGINT, DVC_STAGE="report") == (128 + signal.SIGINT, "")


def test_a_handler_goes_when_its_work_ends_in_whatever_way():
    before, seen = [signal.getsignal(signum) for signum in STOPS], []
    with pytest.raises(ZeroDivisionError), handled(lambda signum, _: seen.append(signum)):
        for signum in STOPS:
            signal.raise_signal(signum)
        raise ZeroDivisionError
    assert seen == list(STOPS) and [signal.getsignal(signum) for signum in STOPS] == before
