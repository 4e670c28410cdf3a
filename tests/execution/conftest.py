"""The miniature of the real pipeline, and the executor that the room's README shows how to write."""

from __future__ import annotations

import re

from tests.pipeline.conftest import PROJECT, finished, project

__all__ = ["example", "finished", "project"]


def example() -> str:
    """Return the Python code in the room's README."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (PROJECT / "altgrad/execution/README.md").read_text(), re.M | re.S)
    return code
