"""What a stage's process is told before torch is loaded."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS_OF_FRESH_TENSORS = """
import resource
from altgrad.common.errors import run_stage

def main(arguments):
    import torch
    torch.set_num_threads(1)
    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    def step():
        return [torch.ones(n) for n in (5_000_000, 50_000, 2_000_000, 500_000)]
    for _ in range(4):
        step()
    before = faults()
    for _ in range(10):
        step()
    print(faults() - before)

run_stage(main)
"""


def faults_of_ten_steps(**environment):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS_OF_FRESH_TENSORS],
        capture_output=True, text=True, check=True, env=os.environ | environment,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    assert faults_of_ten_steps() < 500


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_the_users_own_setting_stands():
    assert faults_of_ten_steps(MALLOC_TRIM_THRESHOLD_="1000000", MALLOC_MMAP_THRESHOLD_="1000000") > 10_000


@pytest.mark.parametrize(
    ("given", "expected"), [({}, ("PASSIVE", "2000")), ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None))]
)
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(monkeypatch, given, expected):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    code = "import os; from altgrad.common.errors import run_stage; run_stage(lambda a: print(os.environ['OMP_WAIT_POLICY'], os.environ.get('GOMP_SPINCOUNT')))"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [expected[0], str(expected[1])]
