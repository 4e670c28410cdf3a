"""What compiling costs: seconds to the first training step of a new process, with and without a warm cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cold_and_warm(first_step_in: Callable[[Path], float]) -> dict[str, Any]:
    """Return ``cold_s`` and ``warm_s``, from two new processes that share a compile cache, empty at first.

    ``first_step_in`` starts a process with the cache in the folder that it is given and returns the
    seconds from the call of the first step to its end, the compiler's own imports included: what is
    waited for, once the model is built.
    """
    with tempfile.TemporaryDirectory(prefix="altgrad-compile-") as folder:
        cold, warm = (first_step_in(Path(folder)) for _ in range(2))
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 1)}
