"""One thread in every test, one cache for what is compiled, and both ways to multiply on every machine.

Results do not depend on the cores with one thread, and small tensors do not pay for waking them. The cache outlives a
run of the tests, as torch's own does, and their processes find it too: graphs and loops are named after all that they
are made of. So they do what Python compiles, even where the environment would have each process compile it anew.

Tests that ask for ``products`` run twice: with operands and products in bfloat16, and in float32 as on a CPU without
bfloat16 instructions. The last lines of a run say how many ran which way.
"""

from __future__ import annotations

import gc
import getpass
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from altgrad.model import hardware
from altgrad.training import machine

torch.set_num_threads(1)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("ALTGRAD_COMPILE_CACHE", str(Path(tempfile.gettempdir()) / f"altgrad-tests-{getpass.getuser()}"))
machine.use_compile_cache(machine.compile_cache(Path()))

WAYS = {"bfloat16": "on", "float32": "off"}
LONGEST = ("execution", "pipeline", "howto")  # packages whose tests train whole pipelines, a minute or two each


@pytest.fixture(params=WAYS)
def products(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return what products are computed in on the CPU, ``bfloat16`` or ``float32``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(hardware.SWITCH, WAYS[request.param])
        _forget_graphs()
        request.node.user_properties.append(("products", request.param))
        yield request.param
    _forget_graphs()


@pytest.fixture
def compiler() -> None:
    """Skip a test of what only a C++ compiler makes, on a machine without one."""
    if machine.missing_tool():
        pytest.skip("needs a C++ compiler")


@pytest.fixture(scope="module")  # not longer: its client leaves an event loop running, which others cannot then start
def browser() -> Iterator[Any]:
    """Return a Chromium that Playwright drives: Debian's, or the one that ``playwright install chromium`` brings."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    with playwright.sync_playwright() as client:
        try:
            found = client.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("needs Chromium")
        yield found
        found.close()


def _forget_graphs() -> None:
    """Drop the graphs of this process, which do not notice that the variable changes."""
    if "torch._dynamo" in sys.modules:  # a second's import
        torch.compiler.reset()


def _unless_it_needs_a_compiler() -> Iterator[None]:
    """Skip, on a machine without a C++ compiler, what torch.compile makes there and what compares the loops in C++."""
    try:
        return (yield)
    except Exception as error:
        needs_one = any(words in str(error) for words in ("No working C++ compiler", "no C++ compiler"))
        if needs_one and machine.missing_tool():
            pytest.skip("needs a C++ compiler")
        raise


pytest_runtest_setup = pytest.hookimpl(wrapper=True)(_unless_it_needs_a_compiler)
pytest_runtest_call = pytest.hookimpl(wrapper=True)(_unless_it_needs_a_compiler)


def pytest_collection_finish() -> None:
    """Leave libraries and tests out of later looks for garbage, which else take a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest modules: each is a single worker's, and the others would wait for a last one."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(here).parts[0] not in LONGEST)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran with products of which dtype."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    called = [report for report in reports if getattr(report, "when", None) == "call"]
    counts = Counter(dict(report.user_properties).get("products") for report in called)
    own = "bfloat16" if hardware.multiplies_bf16() else "float32"
    terminalreporter.write_line(
        f"products on the CPU: {counts['bfloat16']} tests in bfloat16, {counts['float32']} in float32, "
        f"{counts[None]} as this machine has it, in {own}"
    )
