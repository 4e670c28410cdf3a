"""Removing what a smaller grid left behind."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from altgrad.config.files import read_json


def prune(data: Path) -> list[Path]:
    """Remove outputs of cells that are not in ``data/grid/index.json``; return the removed paths, sorted.

    DVC leaves the outputs of a stage that no longer exists on disk. A fresh clone does not have them,
    so what is read here must not depend on them. A cell's outputs are ``data/runs/<key>/`` and
    ``data/diag/<key>.json`` and ``.parquet``; other files, such as a ``.gitignore``, stay.
    """
    keys = set(read_json(data / "grid/index.json")["cells"])
    runs = [path for path in (data / "runs").glob("*/") if path.name not in keys]
    of_diagnoses = itertools.chain.from_iterable((data / "diag").glob(f"*.{end}") for end in ("json", "parquet"))
    diagnoses = [path for path in of_diagnoses if path.stem not in keys]
    for path in runs:
        shutil.rmtree(path)
    for path in diagnoses:
        path.unlink()
    return sorted([*runs, *diagnoses])
