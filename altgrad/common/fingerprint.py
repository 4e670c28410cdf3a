"""Digests of the sources that a stage depends on, and the scratch folder of a run's checkpoints.

DVC clears a stage's outputs before the stage runs, so the scratch folder lies outside them: under the top folder of the
project, even when an experiment runs in a temporary copy of it.

One small file per stage has the digests of its packages, and all runs of the stage depend on that file. If each run
named the packages, DVC would read, hash and write the same lines for each of thousands of runs.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO

import altgrad
from altgrad.common.files import sha256_of, write_json

# Packages that decide the bits of a run.
TRAINING = ("common", "config", "formats", "numerics", "data", "model", "optim", "training")
PACKAGES = {
    "train": TRAINING,
    "diagnose": ("common", "config", "formats", "numerics", "data", "model", "metrics", "diagnostics"),
}
NO_SOURCES = {".md", ".pyc"}  # no stage reads these


def source_files(folder: Path) -> list[Path]:
    """Return the files below ``folder``, sorted, without Markdown and bytecode, which no result depends on."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in NO_SOURCES]
    return sorted(path for path in files if "__pycache__" not in path.parts)


def digest(files: list[Path], top: Path) -> str:
    """Return one SHA-256, as hex digits, of the contents of ``files`` and their paths relative to ``top``."""
    hashed = hashlib.sha256()
    for path in files:
        hashed.update(f"{path.relative_to(top).as_posix()} {sha256_of(path)}\n".encode())
    return hashed.hexdigest()


def write_digests(top: Path, out: Path) -> None:
    """Write ``out/<stage>.json`` for each stage of `PACKAGES`: a digest for each package and for the stage's script."""
    packages = {name for names in PACKAGES.values() for name in names}
    digests = {name: digest(source_files(top / "altgrad" / name), top) for name in packages}
    for stage, names in PACKAGES.items():
        script = f"stages/{stage}.py"
        of_stage = {f"altgrad/{name}": digests[name] for name in names} | {script: digest([top / script], top)}
        write_json(out / f"{stage}.json", of_stage)


def project_root() -> Path:
    """Return the project's top folder: ``DVC_ROOT``, which DVC sets for its stages, or else the working directory."""
    return Path(os.environ.get("DVC_ROOT", ".")).resolve()


def link_ignored(folder: Path) -> None:
    """In a temporary copy of the project, link the files of the project's ``folder`` that the copy lacks.

    `dvc exp run --temp` and the queue run stages in a copy of the files that git tracks. DVC hashes the dependencies of
    a stage again when the stage ends, so it records the linked files. In the project itself nothing happens.
    """
    source = project_root() / folder
    if source == folder.resolve():
        return
    for file in source.rglob("*"):
        target = folder / file.relative_to(source)
        if file.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)


def training_digest(tokens: Path) -> str:
    """Return one SHA-256 of all that decides a run's bits besides its cell: sources, token files, torch's version.

    ``tokens`` is the folder of the token files.
    """
    hashed, package = hashlib.sha256(), Path(altgrad.__file__).parent
    sources = [file for name in TRAINING for file in source_files(package / name)]
    for file in [*sources, tokens / "meta.json", tokens / "train.bin", tokens / "val.bin"]:
        hashed.update(sha256_of(file).encode())
    hashed.update(version("torch").encode())
    return hashed.hexdigest()


@contextmanager
def only_worker(scratch: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the folder ``scratch`` inside the block; make the folder if it is missing.

    If another process has the lock, call ``on_wait()`` and wait. So a second worker on a cell finds the finished
    checkpoint.
    """
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        with open(scratch / "lock", "w") as lock:
            if not _lock(lock, wait=False):
                on_wait()
                _lock(lock, wait=True)
            # The process that had the lock before may have removed the folder, and with it the file locked here.
            if Path(lock.name).exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                yield
                return


def mark_finished(scratch: Path) -> None:
    """Mark the folder ``scratch`` of a run whose results are written, so that `discard_finished` removes it."""
    (scratch / "finished").touch()


def discard_finished(root: Path, key: str = "*") -> None:
    """Remove the folders below ``root/scratch`` of finished runs of the cell ``key``, by default of every cell.

    The folder of a run that is in progress or was interrupted stays.
    """
    for marker in (root / "scratch").glob(f"{key}-{'[0-9a-f]' * 16}/finished"):
        with open(marker.parent / "lock", "w") as lock:
            if _lock(lock, wait=False):
                shutil.rmtree(marker.parent)


def _lock(file: IO[str], *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
