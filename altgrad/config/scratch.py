"""What a stage's results depend on, and where a cell keeps what it needs only until it is finished.

Checkpoints, rows and snapshots lie outside the outputs that DVC clears before a stage runs, under the top folder of the
project even when an experiment runs in a temporary copy of it. The directory is named after all that decides the run's
bits, so no run can resume from the checkpoint of another configuration.

The sources of a stage are digested to one small file for all of its runs. With thousands of runs, each naming every
package that it depends on, DVC would read, hash and write the same lines thousands of times. So each names this file
alone, which changes exactly when one of those packages does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO

import altgrad
from altgrad.config.cell import Cell
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


def project_root() -> Path:
    """Return the top folder of the project: DVC names it to its stages, otherwise the working directory."""
    return Path(os.environ.get("DVC_ROOT", ".")).resolve()


def link_ignored(folder: Path) -> None:
    """Link the files of ``folder`` that git ignores into the working directory, where that is a temporary copy.

    `dvc exp run --temp` and the queue run stages in a copy of what git tracks. DVC hashes a stage's dependencies once
    more when the stage ends, so that it records the files that are linked here.
    """
    source = project_root() / folder
    if source == folder.resolve():
        return
    for file in source.rglob("*"):
        target = folder / file.relative_to(source)
        if file.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)


def scratch_directory(root: Path, cell: Cell, tokens: Path) -> Path:
    """Return the scratch directory of ``cell`` for the present sources, token files and torch version."""
    return root / "scratch" / run_names([cell], tokens)[cell.key]


def run_names(cells: Iterable[Cell], tokens: Path) -> dict[str, str]:
    """Return a name for each cell's run, by its key, that no run with other bits has.

    But for those that sums have when another number of processes shares the batch: an interrupted run may go on with
    more of them, or fewer.
    """
    shared = hashlib.sha256()
    package = Path(altgrad.__file__).parent
    sources = [file for name in TRAINING for file in source_files(package / name)]
    for file in [*sources, tokens / "meta.json", tokens / "train.bin", tokens / "val.bin"]:
        shared.update(sha256_of(file).encode())
    shared.update(version("torch").encode())
    names = {}
    for cell in cells:
        digest = shared.copy()
        digest.update(cell.model_copy(update={"train": cell.train.but(devices=1)}).to_json().encode())
        names[cell.key] = f"{cell.key}-{digest.hexdigest()[:16]}"
    return names


@contextmanager
def only_worker(scratch: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of ``scratch``, made if need be; ``on_wait`` is called if another process holds it.

    A second worker on the same cell waits here and then finds the finished checkpoint.
    """
    while True:
        scratch.mkdir(parents=True, exist_ok=True)
        with open(scratch / "lock", "w") as lock:
            if not _lock(lock, wait=False):
                on_wait()
                _lock(lock, wait=True)
            # The holder before us may have discarded the directory, and with it the file we locked.
            if Path(lock.name).exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                yield
                return


def mark_finished(scratch: Path) -> None:
    """Record that the results of the run in ``scratch`` are written, so that it may be discarded."""
    (scratch / "finished").touch()


def discard_finished(root: Path, key: str = "*") -> None:
    """Remove the scratch directories of finished runs of cell ``key``, or of every cell.

    One that a process is at work in stays, and so does that of an interrupted run.
    """
    for marker in (root / "scratch").glob(f"{key}-*/finished"):
        with open(marker.parent / "lock", "w") as lock:
            if _lock(lock, wait=False):
                shutil.rmtree(marker.parent)


def _lock(file: IO[str], *, wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
