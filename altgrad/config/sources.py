"""The sources that a stage's results depend on, as one small file for all of its runs.

With thousands of runs, each naming every package that it depends on, DVC would read, hash and write the same lines
thousands of times. So each names this file alone, which changes exactly when one of those packages does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from altgrad.config.files import sha256_of, write_json

TRAINING = ("config", "formats", "numerics", "data", "model", "optim", "training")  # which decide a run's bits
PACKAGES = {
    "train": TRAINING,
    "diagnose": ("config", "formats", "numerics", "data", "model", "metrics", "diagnostics"),
}
NO_SOURCES = {".md", ".pyc"}  # pages say what code does, and no stage reads them


def source_files(folder: Path) -> list[Path]:
    """Return the files of a package that its results can depend on, in one order on every machine."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in NO_SOURCES]
    return sorted(path for path in files if "__pycache__" not in path.parts)


def digest(files: list[Path], top: Path) -> str:
    """Return the SHA-256 of the files' names below ``top`` and contents."""
    whole = hashlib.sha256()
    for path in files:
        whole.update(f"{path.relative_to(top).as_posix()} {sha256_of(path)}\n".encode())
    return whole.hexdigest()


def write_digests(top: Path, out: Path) -> None:
    """Write ``out/<stage>.json`` for each stage of `PACKAGES`: a digest for each package and for the stage's script."""
    packages = {name for names in PACKAGES.values() for name in names}
    found = {name: digest(source_files(top / "altgrad" / name), top) for name in packages}
    for stage, names in PACKAGES.items():
        script = f"stages/{stage}.py"
        own = {f"altgrad/{name}": found[name] for name in names} | {script: digest([top / script], top)}
        write_json(out / f"{stage}.json", own)
