"""The committed results of a class of machines: where they are, and what differs from them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

from altgrad.training import machine
from tests.golden.runs import LOSS, Results

FOLDER = Path(__file__).parent / "classes"


def machine_class() -> str:
    """Return what decides the bits of a run on this CPU: `machine.machine_class`, its vectors and the compiler."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    built_by = "no compiler"
    if compiler:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        built_by = said.splitlines()[0]
    return f"{machine.machine_class(torch.device('cpu'))}, {torch.backends.cpu.get_cpu_capability()}, {built_by}"


def path_of(name: str) -> Path:
    """Return the file of a class of machines."""
    processor = re.sub(r"[^a-z0-9]+", "-", name.partition(",")[0].lower()).strip("-")
    return FOLDER / f"{processor}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def difference(name: str, then: Results, now: Results) -> str:
    """Return the differences between two results of the run ``name`` as a line that names files; "" if there are none.

    ``None`` in ``then`` differs from nothing: no machine of the class has recorded the file since it changed.
    """
    if not then:
        return f"{name}: is new"
    found = {
        "differs": [file for file in then if file in now and then[file] not in (None, now[file]) and file != LOSS],
        "missing": [file for file in then if file not in now],
        "new": [file for file in now if file not in then],
    }
    parts = [f"{how}: {', '.join(files)}" for how, files in found.items() if files]
    if then[LOSS] != now[LOSS]:
        parts.append(f"{LOSS} {then[LOSS]} is now {now[LOSS]}")
    return f"{name}: {'; '.join(parts)}" if parts else ""
