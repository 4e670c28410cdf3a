"""What the pipeline itself costs: a throw-away project of the shape of dvc.yaml, whose stages only touch files.

The stages, their matrix, dependencies, parameters and outputs are those of the project; each command, and each
module of a cell's stage, is replaced by one that writes a line to every file that the stage owes. It is run as
`make repro` runs the project, by `altgrad.execution`. What is left is starting processes, reading the
graph, hashing, the cache and the lock file.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from altgrad.config import UserError
from altgrad.config.files import read_yaml, write_text

COPIED = ("altgrad", "stages", "params.yaml", ".dvcignore")  # what runs, what it reads, and what DVC passes over
KEY = "${key}"
REPEATS = 3
# What `altgrad.execution` asks of a cell's file, the tokens', the grid's index and a cell's metrics, all in one.
LINE = json.dumps({
    "train": {"steps": 1}, "format": "E4M3", "cells": [], "params": {"grid": {"baseline": "E4M3"}},
    "optimizer": "adamw", "seed": 0, "lr_scale": 1, "val_loss": 1.0, "vocab_size": 2, "monitor": {"probes": 0},
    "model": {"width": 1, "context": 1, "layers": 1, "mlp_ratio": 1},
})  # fmt: skip
INDEX = "data/grid/index.json"  # which no stage depends on by its name
TOUCH = f'for f; do mkdir -p "${{f%/*}}"; echo \'{LINE}\' > "$f"; done\n'  # in the shell's own words: no process
MODULE = f"""import sys
from pathlib import Path

for name in FILES:
    path = Path(name.replace({KEY!r}, sys.argv[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text({LINE!r})
"""


def measure(project: Path, cells: int) -> dict[str, Any]:
    """Return what the pipeline takes for a grid of ``cells`` cells.

    ``first_s``: seconds of a first run, in which every stage does its trivial work; ``per_cell_s``: the same divided
    by the cells, each of which is two stages; ``no_op_s``: the median of three more, which find nothing to do,
    and ``no_op_range_s`` the fastest and slowest of them. ``took_s``: seconds of all that, making the project
    included.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="altgrad-pipeline-") as folder:
        copy = Path(folder)
        make_project(project, copy, cells)
        first = run_all(copy)
        again = [run_all(copy) for _ in tqdm(range(REPEATS), desc=f"{cells} cells: nothing to do", leave=False)]
    return {
        "cells": cells,
        "first_s": round(first, 2),
        "per_cell_s": round(first / cells, 3),
        "no_op_s": round(statistics.median(again), 2),
        "no_op_range_s": [round(min(again), 2), round(max(again), 2)],
        "took_s": round(time.perf_counter() - started, 1),
    }


def make_project(project: Path, folder: Path, cells: int) -> None:
    """Write the throw-away project of ``cells`` cells into ``folder``, under DVC and, where there is git, git."""
    pipeline = read_yaml(project / "dvc.yaml")
    copy_project(project, folder, pipeline)
    params = read_yaml(project / "params.yaml")
    params["grid"] |= {"formats": ["E4M3"], "optimizers": ["adamw"], "seeds": list(range(cells)), "lr_scales": [1]}
    write_text(folder / "params.yaml", json.dumps(params))  # JSON is YAML
    keys = [f"E4M3-adamw-{seed}-1" for seed in range(cells)]
    write_text(folder / "touch.sh", TOUCH)
    stages = _trivial(pipeline, keys, folder)
    write_text(folder / "dvc.yaml", json.dumps({"stages": stages}))  # unsorted: the matrix decides the keys
    make_repository(folder)


def copy_project(project: Path, folder: Path, pipeline: dict[str, Any]) -> None:
    """Copy into ``folder`` what the stages of ``pipeline`` need of the project."""
    for name in copied(pipeline):
        source, target = project / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)


def copy_without_report(project: Path, folder: Path) -> None:
    """Make ``folder`` a project that trains and diagnoses what ``project`` does, and writes no report of it."""
    pipeline = read_yaml(project / "dvc.yaml")
    del pipeline["stages"]["report"]
    copy_project(project, folder, pipeline)
    write_text(folder / "dvc.yaml", json.dumps(pipeline))
    make_repository(folder)


def make_repository(folder: Path) -> None:
    """Put ``folder`` under DVC and, where there is git, git."""
    if shutil.which("git"):
        _run(folder, "git", "init", "--quiet")
        _run(folder, *_dvc("init", "--quiet"))
    else:
        _run(folder, *_dvc("init", "--quiet", "--no-scm"))
    _run(folder, *_dvc("config", "core.analytics", "false"))


def copied(pipeline: dict[str, Any]) -> list[str]:
    """Return what the throw-away project has from the real one: `COPIED`, and what stages read and none makes."""
    stages = pipeline["stages"].values()
    made = {_path(out) for stage in stages for out in _outs(stage)}
    read = {dep for stage in stages for dep in stage.get("deps", []) if KEY not in dep}
    return [*COPIED, *sorted(dep for dep in read if not _within(dep, made) and not _within(dep, COPIED))]


def _within(path: str, places: Iterable[str]) -> bool:
    """Whether the path is one of the places, is in one, or is a folder with one in it, such as that of all cells."""
    return any(Path(path).is_relative_to(place) or Path(place).is_relative_to(path) for place in places)


def _outs(stage: dict[str, Any]) -> list[str | dict[str, Any]]:
    return [out for kind in ("outs", "metrics") for out in stage.get(kind, [])]


def _trivial(pipeline: dict[str, Any], keys: list[str], folder: Path) -> dict[str, Any]:
    """Return the stages with commands that only write the files that they or later stages name.

    The modules in ``folder`` that `altgrad.execution` would run for a cell then do the same.
    """
    stages = {name: dict(stage) for name, stage in pipeline["stages"].items()}
    wanted = [INDEX, *(path for stage in stages.values() for path in stage.get("deps", []))]
    for name, stage in stages.items():
        files = [file for out in _outs(stage) for file in _files(_path(out), wanted)]
        if "matrix" not in stage:
            files = [file.replace(KEY, key) for file in files for key in (keys if KEY in file else [""])]
        else:
            write_text(folder / "stages" / f"{name}.py", MODULE.replace("FILES", repr(files)))
        stage["cmd"] = " ".join(["sh touch.sh", *files])
    return stages


def _path(out: str | dict[str, Any]) -> str:
    return out if isinstance(out, str) else next(iter(out))


def _files(out: str, wanted: list[str]) -> list[str]:
    """Return the files that make the output: those that a stage depends on, else itself or one inside it."""
    inside = sorted({path for path in wanted if path.startswith(out + "/")})
    return inside or [out if Path(out).suffix else f"{out}/content"]


def run_all(folder: Path, *options: str, **variables: str) -> float:
    """Do what `make repro` does, under these environment variables; return the seconds."""
    started = time.perf_counter()
    _run(folder, sys.executable, "-m", "altgrad.execution", *options, **variables)
    return time.perf_counter() - started


def _dvc(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dvc", *arguments]


def _run(folder: Path, *command: str, **variables: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "GIT_"))}
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment |= {"DVC_NO_ANALYTICS": "1", "PATH": programs, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise UserError(f"the throw-away pipeline failed at `{' '.join(command[:4])}`: {' / '.join(last)}")
