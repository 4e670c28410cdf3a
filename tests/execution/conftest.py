"""The miniature of the real pipeline, and the executor that the package's README shows how to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future

from tests.pipeline.conftest import PROJECT, finished, planned, project

__all__ = ["example", "finished", "planned", "project"]


class AtOnce:
    """Stands in for a pool of threads: what it is given is done when it is given it."""

    def __init__(self, threads: int) -> None:
        assert threads == 1

    def submit(self, function: Callable[..., object], *arguments: object) -> Future[object]:
        future: Future[object] = Future()
        future.set_result(function(*arguments))
        return future


def example() -> str:
    """Return the Python code in the package's README."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (PROJECT / "altgrad/execution/README.md").read_text(), re.M | re.S)
    return code
