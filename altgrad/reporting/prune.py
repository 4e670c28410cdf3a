"""Removing what a smaller grid left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

from altgrad.config.files import read_json


def prune(grid_dir: Path, runs_dir: Path, diag_dir: Path) -> list[Path]:
    """Remove outputs of cells that are not in ``grid_dir/index.json``; return the removed paths, sorted.

    DVC leaves the outputs of a stage that no longer exists on disk. A fresh clone does not have them,
    so what is read here must not depend on them. A cell's outputs are ``runs_dir/<key>/`` and
    ``diag_dir/<key>.json`` and ``.parquet``; other files, such as a ``.gitignore``, stay.
    """
    keys = set(read_json(grid_dir / "index.json")["cells"])
    runs = [path for path in _entries(runs_dir) if path.is_dir() and path.name not in keys]
    diagnoses = [path for path in _entries(diag_dir) if path.suffix in (".json", ".parquet") and path.stem not in keys]
    for path in runs:
        shutil.rmtree(path)
    for path in diagnoses:
        path.unlink()
    return sorted([*runs, *diagnoses])


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
