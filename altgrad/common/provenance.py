"""The command, commit, versions and machine of a measured result, for the records of proofs and benchmarks.

This is the only file of the package that imports torch.
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
    """Return, by name, the command, commit (None without git), versions, processor, threads and the machine's load.

    Args:
        module: the module that was run with ``python -m``.
        arguments: the module's arguments; None: the arguments of this process.
    """
    import torch  # slow to load, and most commands do not need it

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
    """Write ``record`` to ``path`` as JSON, atomically. The keys keep their order."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def _git(*arguments: str) -> str | None:
    try:
        folder = Path(__file__).parents[1]  # the whole package
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
