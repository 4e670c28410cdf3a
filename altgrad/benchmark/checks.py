"""The tests that hold a GPU against the CPU, run as they are, several at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from altgrad.benchmark.needs import left_out
from altgrad.common.threads import usable_cores
from altgrad.training.machine import compile_cache

MOST_AT_A_TIME = 8


def run(name: str, tests: list[str], limit_s: float) -> dict[str, Any]:
    """Return how many of ``tests``, as pytest names them, passed, failed and were skipped, and which failed.

    Raises RuntimeError with pytest's last words where it has run none or not ended after ``limit_s`` seconds.
    """
    if absent := [package for package, what in left_out().items() if what == "checks"]:
        raise RuntimeError(f"not installed: {', '.join(absent)}")
    beside = ["-n", str(min(MOST_AT_A_TIME, usable_cores())), "--dist", "load"] if find_spec("xdist") else []
    with tempfile.TemporaryDirectory(prefix="altgrad-checks-") as folder:
        result = Path(folder) / "result.xml"
        command = [sys.executable, "-m", "pytest", *tests, *beside, f"--junitxml={result}", "-p", "no:cacheprovider"]
        began = time.perf_counter()
        try:
            environment = os.environ | {"ALTGRAD_COMPILE_CACHE": str(compile_cache(Path.cwd()))}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{' '.join(tests)} had not ended after {limit_s:.0f} s") from None
        took = time.perf_counter() - began
        if not result.exists():
            raise RuntimeError(" / ".join((done.stdout + done.stderr).strip().splitlines()[-3:]))
        cases = list(ElementTree.parse(result).iter("testcase"))
    failed = [case.attrib["name"] for case in cases if _has(case, "failure", "error")]
    skipped = sum(_has(case, "skipped") for case in cases)
    if not cases:
        raise RuntimeError(f"{' '.join(tests)}: pytest ran no test")
    return {
        "name": name, "passed": len(cases) - len(failed) - skipped, "failed": failed, "skipped": skipped,
        "took_s": round(took, 1),
    }  # fmt: skip


def _has(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)
