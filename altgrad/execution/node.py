"""The part of an executor that runs on each machine of a cluster: a `LocalPool` in its own folder, and file transfer.

A node knows nothing of Ray. It takes a task with the files that the task reads. It returns ended tasks with the files
that they wrote, and for running tasks the new output and checkpoints.

A parcel holds files as bytes by name. A file is put in place whole or not at all. Nothing in a parcel is run or
unpickled, and no name in it leads out of the target folder.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from altgrad.common.errors import DISK_FULL, UserError
from altgrad.common.files import replacing
from altgrad.execution import LOGS, Task
from altgrad.execution.local import LocalPool

WRITES = {"train": ("data/runs/{key}",), "diagnose": ("data/diag/{key}.json", "data/diag/{key}.parquet")}
READS = {
    "train": ("data/grid/{key}.json",),
    "diagnose": ("data/grid/{key}.json", "data/runs/{key}", "params.yaml"),
}
SHARED = ("data/tokens",)  # read by every task, and the same for all
GROWING = (".jsonl",)  # files that are appended to; only their new part is sent
KEEP_EVERY = 30.0  # seconds between looks for a checkpoint to send

Parcel = Mapping[str, bytes]  # the content of files, by name relative to a project's top folder


def pack(root: Path, names: Iterable[str]) -> Parcel:
    """Return the files and folders ``names`` below ``root`` as a parcel; missing ones are left out."""
    files: dict[str, bytes] = {}
    for name in names:
        path = root / name
        members = sorted(path.rglob("*")) if path.is_dir() else [path]
        files |= {file.relative_to(root).as_posix(): file.read_bytes() for file in members if file.is_file()}
    return files


def unpack(parcel: Parcel, root: Path, below: Iterable[str]) -> None:
    """Write the files of ``parcel`` below ``root``.

    ``below``: the names of the only files and folders that the parcel may hold. Such a folder is replaced as a whole.
    Raises :class:`UserError`, and changes nothing, if the parcel holds other names.
    """
    allowed = list(below)
    by_place: dict[str, dict[str, bytes]] = {}
    for name, content in parcel.items():
        path = PurePosixPath(name)
        outside = ".." in path.parts or path.is_absolute()
        place = next((place for place in allowed if not outside and path.is_relative_to(place)), None)
        if place is None:
            raise UserError(f"another machine sent {name}, which is none of what it was asked for")
        by_place.setdefault(place, {})[name] = content
    for place, files in by_place.items():
        target = root / place
        if set(files) == {place}:
            with replacing(target) as temporary:
                temporary.write_bytes(files[place])
            continue
        coming = target.with_name(f".{target.name}.coming")
        shutil.rmtree(coming, ignore_errors=True)
        for name, content in files.items():
            file = coming / PurePosixPath(name).relative_to(place)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        shutil.rmtree(target, ignore_errors=True)
        coming.rename(target)


def places(of: dict[str, tuple[str, ...]], task: Task) -> list[str]:
    """Return the names of files and folders that ``of``, `READS` or `WRITES`, has for ``task``."""
    return [name.format(key=task.key) for name in of[task.stage]]


class About(NamedTuple):
    """The description of a node."""

    name: str
    machine_class: str  # machines of one class give the same bits
    slots: int  # tasks at a time


class Growth(NamedTuple):
    """The new end of a file that has grown: the file has ``content`` from byte ``start`` to its end."""

    start: int
    content: bytes

    def write_to(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.seek(self.start)
            file.write(self.content)
            file.truncate()


class Ended(NamedTuple):
    """An ended task: its name and exit status, its outputs if the status is 0, and whether the disk was full."""

    name: str
    status: int
    wrote: Parcel | None
    full: bool


class News(NamedTuple):
    """What has happened on a node since the last call of `Node.news`."""

    ended: list[Ended]
    grown: dict[str, Growth]  # logs and rows of tasks, by path
    kept: dict[str, Parcel]  # new checkpoint files, by name of the task
    gone: list[str]  # paths of checkpoint files that were removed


class Node:
    """Runs tasks on its machine in a temporary folder, up to ``slots`` at a time; None: as many as `LocalPool` would.

    ``threads``, ``gpus`` and ``cell_mb`` are those of `LocalPool`; ``keep_every``: seconds between checkpoints sent.
    """

    def __init__(
        self, name: str, slots: int | None, threads: int, gpus: int, keep_every: float = KEEP_EVERY,
        cell_mb: float | None = None,
    ) -> None:  # fmt: skip
        folder = Path(tempfile.mkdtemp(prefix="altgrad-node-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.chdir(folder)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ.setdefault("ALTGRAD_COMPILE_CACHE", str(cache / "altgrad/compiled"))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        LOGS.mkdir(parents=True)
        self._name, self._slots, self._keep_every = name, slots, keep_every
        self._pool = LocalPool(slots, threads, gpus, cell_mb)
        self._tasks: dict[str, Task] = {}  # given and not ended
        self._over: dict[str, int] = {}  # exit statuses of ended tasks that `news` has not returned yet
        self._sent: dict[Path, int] = {}  # bytes of a growing file that were sent
        self._seen: dict[str, dict[Path, tuple[int, int]]] = {}  # size and date of a task's files that were sent
        self._kept_at: dict[str, float] = {}

    def about(self) -> About:
        """Return this node's description. Raises RuntimeError with the reason if altgrad cannot work on the machine."""
        # The process of a pool is asked: it loads the libraries, so that the first tasks need not wait for them.
        answer, theirs = self._pool.context.Pipe(duplex=False)
        asked = self._pool.context.Process(target=_tell_class, args=(theirs,))
        asked.start()
        theirs.close()
        try:
            works, said = answer.recv()
        except EOFError:
            works, said = False, "a process that was to say so died"
        asked.join()
        if not works:
            raise RuntimeError(f"altgrad does not run there: {said}")
        return About(self._name, said, self._slots or self._pool.jobs)

    def take(self, shared: Parcel) -> None:
        """Write the files that every task reads (`SHARED`)."""
        unpack(shared, Path(), SHARED)

    def run(self, task: Task, reads: Parcel, scratch: str | None) -> None:
        """Start ``task``; ``reads`` has the files that it reads, and its folder ``scratch`` if it began elsewhere."""
        for place in WRITES[task.stage]:
            shutil.rmtree(place, ignore_errors=True)
        unpack(reads, Path(), [*places(READS, task), *([scratch] if scratch else [])])
        task.log.unlink(missing_ok=True)
        self._sent.pop(task.log, None)
        self._tasks[task.name], self._seen[task.name] = task, {}
        self._kept_at[task.name] = time.monotonic()
        self._pool.submit([task])
        self._poll()

    def news(self) -> News:
        """Return the news of this node's tasks since the last call of this method."""
        self._poll()
        over, self._over = self._over, {}
        grown: dict[str, Growth] = {}
        kept: dict[str, Parcel] = {}
        gone: list[str] = []
        for name, task in self._tasks.items():
            scratch = task.scratch
            rows = [path for path in sorted(scratch.iterdir()) if path.suffix in GROWING] if scratch else []
            # Checkpoints first: rows then reach at least as far, and a resumed cell cuts them back to its checkpoint.
            due = time.monotonic() - self._kept_at[name] >= self._keep_every
            if scratch and over.get(name) != 0 and (name in over or due):
                self._kept_at[name] = time.monotonic()
                kept[name], lost = self._checkpoints(name, scratch)
                gone += lost
            grown |= {str(path): growth for path in (task.log, *rows) if (growth := self._growth(path))}
        ended = [self._ended(self._tasks.pop(name), status) for name, status in over.items()]
        return News(ended, grown, kept, gone)

    def cancel(self, signum: int, only: list[str] | None) -> None:
        self._pool.cancel(signum, only)

    def _poll(self) -> None:
        self._over |= {outcome.task.name: outcome.status for outcome in self._pool.poll().ended}

    def _growth(self, path: Path) -> Growth | None:
        if not path.exists():
            return None
        size, sent = path.stat().st_size, self._sent.get(path, 0)
        start = sent if sent <= size else 0
        if size == start and sent <= size:
            return None
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read(size - start)
        self._sent[path] = start + len(content)
        return Growth(start, content)

    def _checkpoints(self, name: str, scratch: Path) -> tuple[Parcel, list[str]]:
        """Return the new files in ``scratch`` that task ``name`` would resume from, and the paths of removed ones."""
        before, now = self._seen[name], {}
        for path in sorted(scratch.iterdir(), key=lambda path: path.suffix == ".json"):
            if path.is_file() and path.suffix not in GROWING and path.name != "lock" and not path.name.startswith("."):
                now[path] = path.stat().st_size, path.stat().st_mtime_ns
        self._seen[name] = now
        new = [str(path) for path, state in now.items() if before.get(path) != state]
        return pack(Path(), new), [str(path) for path in before if path not in now]

    def _ended(self, task: Task, status: int) -> Ended:
        """Return how ``task`` has ended, with its outputs if ``status`` is 0; remove its files."""
        wrote = pack(Path(), places(WRITES, task)) if status == 0 else None
        said = task.log.read_text(errors="replace")[-2000:] if status and task.log.exists() else ""
        if status == 0:
            for place in (*places(WRITES, task), *([] if task.stage == "train" else [f"data/runs/{task.key}"])):
                shutil.rmtree(place, ignore_errors=True)
                Path(place).unlink(missing_ok=True)
        del self._seen[task.name], self._kept_at[task.name]
        if (scratch := task.scratch) is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        self._sent = {path: sent for path, sent in self._sent.items() if scratch not in path.parents}
        return Ended(task.name, status, wrote, DISK_FULL in said)


def _tell_class(answer: Connection) -> None:
    """Send (True, class of this machine) to ``answer``, or (False, the reason) if altgrad does not work here."""
    try:
        from altgrad.model.hardware import select_device  # both load torch
        from altgrad.training.machine import machine_class

        answer.send((True, machine_class(select_device("auto"))))
    except Exception as error:  # noqa: BLE001 - any error means that the machine cannot be used
        answer.send((False, f"{type(error).__name__}: {error}"))
