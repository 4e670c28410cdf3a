"""Where a measured result comes from, for the records that proofs and benchmarks write.

A file of its own, as it is the only one here that asks torch something.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from altgrad.common.files import write_text
from altgrad.common.threads import processor_name


def environment(module: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the command, commit, versions, processor, threads and the load of the machine.

    Args:
        module: the module that was run with ``python -m``.
        arguments: its arguments; None for those of this process.
    """
    import torch  # which most commands do without

    return {
        "command": " ".join(["python -m", module, *(sys.argv[1:] if arguments is None else arguments)]),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", ".")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor_name(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` to ``path`` as JSON, atomically, in the order that it has."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def _git(*arguments: str) -> str | None:
    try:
        folder = Path(__file__).parents[1]  # the whole package
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
