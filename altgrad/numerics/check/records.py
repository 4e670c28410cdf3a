"""What the proof and the benchmark write down: results, and where they were made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from altgrad.common.files import write_text
from altgrad.common.threads import processor_name


def environment(module: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return the command, commit, versions, processor, threads and how busy the machine was.

    Args:
        module: what was run with ``python -m``.
        arguments: its arguments; None for those of this process.
    """
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
        # All of AltGrad: what is measured is more than this package.
        folder = Path(__file__).parents[1]
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
