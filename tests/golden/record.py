"""The committed results of a class of machines: where they are, and what differs from them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from altgrad.training import machine
from tests.golden.runs import Results

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


def differences(name: str, then: Results, now: Results) -> Iterator[str]:
    """Yield what differs between two results of the run ``name``, file by file."""
    if not then:
        yield f"{name}: is new"
        return
    for file in sorted((then.keys() | now.keys()) - {"val_loss"}):
        if then.get(file) != now.get(file):
            how = "is new" if file not in then else "is missing" if file not in now else "differs"
            yield f"{name}: {file} {how}"
    if then.get("val_loss") != now.get("val_loss"):
        yield f"{name}: val_loss {then.get('val_loss')} is now {now.get('val_loss')}"
