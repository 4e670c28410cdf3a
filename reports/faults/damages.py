"""Damaged files, full and read-only file systems, and what the command makes of each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from reports.faults.campaign import OWN_CACHE, UGLY, Bench, Outcome, end_children, run, sentences, stop
from tests.pipeline.conftest import Project

RUN = "data/runs/E4M3-adamw-0-1"


def cut(path: Path) -> None:
    """Leave the first half of a file, as it was protected and dated."""
    _changed(path, path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, without a trace of when."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    _changed(path, bytes(content))


DAMAGE = {"cut": cut, "bit flipped": flip}


def _changed(path: Path, content: bytes) -> None:
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(before.st_mode & 0o777)


def _object_of(folder: Path, name: str) -> Path:
    """Return the object of the cache with the content of a file of the project."""
    content = (folder / name).read_bytes()
    objects = (folder / ".dvc/cache/files/md5").rglob("*")
    return next(path for path in objects if path.is_file() and path.read_bytes() == content)


def _without(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _damage_run(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(_object_of(folder, f"{RUN}/model.safetensors"))
    _without(folder, "data/runs")


def _damage_tokens(folder: Path, damage: Callable[[Path], None]) -> None:
    path = folder / "data/tokens/val.bin"
    damage(path)
    os.utime(path)  # dated: what has no trace at all is for the checksums of a file system


def _damage_tokens_object(folder: Path) -> None:
    flip(_object_of(folder, "data/tokens/train.bin"))
    _without(folder, "data/tokens", "data/runs", "data/diag", ".dvc/cache/runs", "dvc.lock")


def _damage_run_cache(folder: Path, damage: Callable[[Path], None]) -> None:
    for path in (folder / ".dvc/cache/runs").rglob("*"):
        if path.is_file():
            damage(path)
    _without(folder, "dvc.lock", "data/runs")


def _merged(folder: Path) -> None:
    text = (folder / "dvc.lock").read_text()
    (folder / "dvc.lock").write_text(f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> theirs\n")


def _in_the_future(folder: Path) -> None:
    """Date everything a day ahead, as it looks once a clock was set back."""
    ahead = time.time() + 86400
    for path in folder.rglob("*"):
        if path.exists() and ".git" not in path.parts:
            os.utime(path, (ahead, ahead))


#: What is done to the folder of a finished project before its command is run again.
DAMAGES: dict[tuple[str, str], Callable[[Path], None]] = {
    ("cut", "dvc.lock"): lambda f: cut(f / "dvc.lock"),
    ("bit flipped", "dvc.lock"): lambda f: flip(f / "dvc.lock"),
    ("emptied", "dvc.lock"): lambda f: (f / "dvc.lock").write_bytes(b""),
    ("conflict of a merge", "dvc.lock"): _merged,
    ("cut", "rwlock"): lambda f: (f / ".dvc/tmp/rwlock").write_text('{"write": {"/'),
    ("emptied", "rwlock"): lambda f: (f / ".dvc/tmp/rwlock").write_text(""),
    ("cut", "a token file"): lambda f: _damage_tokens(f, cut),
    ("bit flipped", "a token file"): lambda f: _damage_tokens(f, flip),
    ("cut", "a run's object of the cache"): lambda f: _damage_run(f, cut),
    ("bit flipped", "a run's object of the cache"): lambda f: _damage_run(f, flip),
    ("bit flipped", "the tokens' object of the cache"): _damage_tokens_object,
    ("cut", "every entry of the run cache"): lambda f: _damage_run_cache(f, cut),
    ("bit flipped", "every entry of the run cache"): lambda f: _damage_run_cache(f, flip),
    ("deleted", "the cache"): lambda f: _without(f, ".dvc/cache"),
    ("deleted", "the cache and a run's folder"): lambda f: _without(f, ".dvc/cache", RUN),
    ("deleted", "a run's folder"): lambda f: _without(f, RUN),
    ("deleted", "data/tokens"): lambda f: _without(f, "data/tokens"),
    ("deleted", "dvc.lock"): lambda f: _without(f, "dvc.lock"),
    ("deleted", "everything below data/ but the corpus"): lambda f: _without(
        f, "data/tokens", "data/grid", "data/runs", "data/diag", "data/code"),
    ("clock set back", "a day"): _in_the_future,
}  # fmt: skip


def damaged(bench: Bench, fault: str, place: str) -> Outcome:
    """Damage a finished project and run its command."""
    project = bench.copy(bench.finished)
    DAMAGES[fault, place](project.folder)
    return bench.after(project, fault, place, "", or_sentence=True)


def damaged_checkpoint(bench: Bench, fault: str) -> Outcome:
    """Interrupt training after a checkpoint, damage every checkpoint that is there, and go on."""
    project = bench.copy(bench.planned.folder)
    stop(project, "training, after a checkpoint", signal.SIGTERM)
    checkpoints = [path for path in project.folder.glob("scratch/*/step-*") if path.is_file()]
    for path in checkpoints:
        DAMAGE[fault](path)
    place = f"{len(checkpoints)} files of checkpoints"
    return bench.after(project, fault, place, "", bool(checkpoints), or_sentence=True)


def damaged_loops(bench: Bench, fault: str) -> Outcome:
    """Damage the compiled loops in C++, and train anew."""
    project = bench.copy(bench.compiled.folder)
    cache = project.folder / OWN_CACHE["ALTGRAD_COMPILE_CACHE"]
    files = [path for path in cache.rglob("*.so") if path.is_file() and "altgrad" in path.parts]
    for path in files:
        DAMAGE[fault](path)
    _without(project.folder, ".dvc/cache", "data/runs", "dvc.lock")
    return bench.after(project, fault, f"{len(files)} files of loops in C++", "", bool(files), compiled=True)


def _mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode


@contextmanager
def _mounted(bench: Bench, name: str) -> Iterator[Project]:
    """Give a copy of the fresh project on a file system of its own, of 1 GB."""
    place = bench.folder / name
    place.mkdir()
    assert _mount("-t", "tmpfs", "-o", "size=1g", "none", str(place)) == 0
    try:
        yield Project.at(shutil.copytree(bench.fresh.folder, place / "project", symlinks=True))
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def disk_full(bench: Bench, free_mb: float) -> Outcome:
    """Run on a file system with so many MB (10^6 bytes) free, then with room enough."""
    with _mounted(bench, f"full-{free_mb:g}") as project:
        place = str(project.folder.parent)
        taken = shutil.disk_usage(place).used
        _mount("-o", f"remount,size={taken + int(free_mb * 1e6)}", place)
        done = run(project, check=False)
        end_children(project)
        words, ugly = sentences(done.stderr), [word for word in UGLY if word in done.stderr]
        said = f"exit {done.returncode}" + (f": {words[-1]}" if words else "") + (f" ({ugly})" if ugly else "")
        _mount("-o", f"remount,size={2 * taken + (1 << 30)}", place)
        return bench.after(project, "disk full", f"{free_mb:g} MB free", said, not ugly)


def read_only(bench: Bench) -> Outcome:
    """Run on a file system that may not be written, then on one that may."""
    with _mounted(bench, "read-only") as project:
        place = str(project.folder.parent)
        _mount("-o", "remount,ro", place)
        done = run(project, check=False)
        words = sentences(done.stderr)
        _mount("-o", "remount,rw", place)
        clean = len(words) == 1 and not any(word in done.stderr for word in UGLY)
        return bench.after(project, "read-only", "the whole project", f"exit {done.returncode}: {words[:1]}", clean)


def may_mount(folder: Path) -> bool:
    """Return whether this process may mount a file system."""
    place = folder / "may-mount"
    place.mkdir(parents=True, exist_ok=True)
    status = _mount("-t", "tmpfs", "none", str(place))
    subprocess.run(["umount", str(place)], capture_output=True, check=False)
    return status == 0
