"""A throw-away copy of the project that trains and diagnoses what it does, and writes no report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from altgrad.config import UserError
from altgrad.config.files import read_yaml, write_text

COPIED = ("altgrad", "stages", "params.yaml", ".dvcignore")  # what runs, what it reads, and what DVC passes over
KEY = "${key}"


def copy_without_report(project: Path, folder: Path) -> None:
    """Make ``folder`` a project of all stages of ``project`` but the report, under DVC and, where there is git, git."""
    pipeline = read_yaml(project / "dvc.yaml")
    del pipeline["stages"]["report"]
    for name in copied(pipeline):
        source, target = project / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)
    write_text(folder / "dvc.yaml", json.dumps(pipeline))  # unsorted: the matrix decides the keys
    git = shutil.which("git") is not None
    if git:
        _run(folder, "git", "init", "--quiet")
    _run(folder, sys.executable, "-m", "dvc", "init", "--quiet", *([] if git else ["--no-scm"]))
    _run(folder, sys.executable, "-m", "dvc", "config", "core.analytics", "false")


def copied(pipeline: dict[str, Any]) -> list[str]:
    """Return what the copy has of the project: `COPIED`, and what stages read and none makes."""
    stages = pipeline["stages"].values()
    outs = [out for stage in stages for kind in ("outs", "metrics") for out in stage.get(kind, [])]
    made = {out if isinstance(out, str) else next(iter(out)) for out in outs}
    read = {dep for stage in stages for dep in stage.get("deps", []) if KEY not in dep}
    return [*COPIED, *sorted(dep for dep in read if not _within(dep, made) and not _within(dep, COPIED))]


def _within(path: str, places: Iterable[str]) -> bool:
    """Whether the path is one of the places, is in one, or is a folder with one in it, such as that of all cells."""
    return any(Path(path).is_relative_to(place) or Path(place).is_relative_to(path) for place in places)


def run_all(folder: Path, *options: str, **variables: str) -> float:
    """Do what `make repro` does, under these environment variables; return the seconds."""
    started = time.perf_counter()
    _run(folder, sys.executable, "-m", "altgrad.execution", *options, **variables)
    return time.perf_counter() - started


def _run(folder: Path, *command: str, **variables: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "GIT_"))}
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment |= {"DVC_NO_ANALYTICS": "1", "PATH": programs, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise UserError(f"the throw-away copy failed at `{' '.join(command[:4])}`: {' / '.join(last)}")
