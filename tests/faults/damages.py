"""Damage done to a project's files, and what its command makes of it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.campaign import HOOK, MOMENTS, OWN_CACHE, Bench, Outcome, end_children, run
from tests.pipeline.conftest import Project


def cut(path: Path) -> None:
    """Leave the first half of a file, as it was protected and dated."""
    _changed(path, path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file, without a trace of when."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    _changed(path, bytes(content))


def _changed(path: Path, content: bytes) -> None:
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(before.st_mode & 0o777)


def _object_of(project: Project, name: str) -> Path:
    """Return the object of the cache with the content of a file of the project."""
    content = (project.folder / name).read_bytes()
    objects = (project.folder / ".dvc/cache/files/md5").rglob("*")
    return next(path for path in objects if path.is_file() and path.read_bytes() == content)


def _without(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _damage_run(project: Project, damage: Callable[[Path], None]) -> None:
    metrics = "data/runs/E4M3-adamw-0-1/model.safetensors"
    damage(_object_of(project, metrics))
    _without(project.folder, "data/runs")


def _damage_tokens(project: Project, damage: Callable[[Path], None]) -> None:
    path = project.folder / "data/tokens/val.bin"
    damage(path)
    os.utime(path)  # dated: what has no trace at all is for the checksums of a file system


def _damage_tokens_object(project: Project, damage: Callable[[Path], None]) -> None:
    damage(_object_of(project, "data/tokens/train.bin"))
    _without(project.folder, "data/tokens", "data/runs", "data/diag", ".dvc/cache/runs", "dvc.lock")


def _damage_run_cache(project: Project, damage: Callable[[Path], None]) -> None:
    for path in (project.folder / ".dvc/cache/runs").rglob("*"):
        if path.is_file():
            damage(path)
    _without(project.folder, "dvc.lock", "data/runs")


def _merged(project: Project) -> None:
    lock = project.folder / "dvc.lock"
    text = lock.read_text()
    lock.write_text(f"<<<<<<< HEAD\n{text}=======\n{text}>>>>>>> theirs\n")


def _in_the_future(project: Project) -> None:
    """Date everything a day ahead, as it looks once a clock was set back."""
    ahead = time.time() + 86400
    for path in project.folder.rglob("*"):
        if path.exists() and ".git" not in path.parts:
            os.utime(path, (ahead, ahead))


#: What is done to a finished project before its command is run again.
DAMAGES: dict[tuple[str, str], Callable[[Project], None]] = {
    ("cut", "dvc.lock"): lambda p: cut(p.folder / "dvc.lock"),
    ("bit flipped", "dvc.lock"): lambda p: flip(p.folder / "dvc.lock"),
    ("emptied", "dvc.lock"): lambda p: (p.folder / "dvc.lock").write_bytes(b""),
    ("conflict of a merge", "dvc.lock"): _merged,
    ("cut", "rwlock"): lambda p: (p.folder / ".dvc/tmp/rwlock").write_text('{"write": {"/'),
    ("emptied", "rwlock"): lambda p: (p.folder / ".dvc/tmp/rwlock").write_text(""),
    ("cut", "a token file"): lambda p: _damage_tokens(p, cut),
    ("bit flipped", "a token file"): lambda p: _damage_tokens(p, flip),
    ("cut", "a run's object of the cache"): lambda p: _damage_run(p, cut),
    ("bit flipped", "a run's object of the cache"): lambda p: _damage_run(p, flip),
    ("bit flipped", "the tokens' object of the cache"): lambda p: _damage_tokens_object(p, flip),
    ("cut", "every entry of the run cache"): lambda p: _damage_run_cache(p, cut),
    ("bit flipped", "every entry of the run cache"): lambda p: _damage_run_cache(p, flip),
    ("deleted", "the cache"): lambda p: _without(p.folder, ".dvc/cache"),
    ("deleted", "the cache and a run's folder"): lambda p: _without(
        p.folder, ".dvc/cache", "data/runs/E4M3-adamw-0-1"),
    ("deleted", "a run's folder"): lambda p: _without(p.folder, "data/runs/E4M3-adamw-0-1"),
    ("deleted", "data/tokens"): lambda p: _without(p.folder, "data/tokens"),
    ("deleted", "dvc.lock"): lambda p: _without(p.folder, "dvc.lock"),
    ("deleted", "everything below data/ but the corpus"): lambda p: _without(
        p.folder, "data/tokens", "data/grid", "data/runs", "data/diag", "data/code"),
    ("clock set back", "a day"): _in_the_future,
}  # fmt: skip


def damaged(bench: Bench, fault: str, place: str) -> Outcome:
    """Damage a finished project and run its command."""
    project = bench.copy(bench.finished)
    DAMAGES[fault, place](project)
    return bench.after(project, fault, place, "", or_sentence=True)


def damaged_checkpoint(bench: Bench, fault: str) -> Outcome:
    """Interrupt training after a checkpoint, damage every checkpoint that is there, and go on."""
    project = bench.copy(bench.planned.folder)
    place = project.folder / "scratch/fault"
    place.mkdir(parents=True)
    run(project, check=False, PYTHONPATH=str(HOOK), FAULT=MOMENTS["training, after a checkpoint"],
        FAULT_SIGNAL=str(int(signal.SIGTERM)), FAULT_PLACE=str(place))  # fmt: skip
    end_children(project)
    found = [path for path in project.folder.glob("scratch/*/step-*") if path.is_file()]
    for path in found:
        {"cut": cut, "bit flipped": flip}[fault](path)
    return bench.after(project, fault, f"{len(found)} files of checkpoints", "", bool(found), or_sentence=True)


def damaged_compiled(bench: Bench, fault: str, what: str) -> Outcome:
    """Damage what was compiled, and train anew: ``what`` is "loops in C++" or "compiled graphs"."""
    graphs = what == "compiled graphs"
    project = bench.copy(bench.compiled.folder)
    found = [
        path for path in (project.folder / OWN_CACHE["ALTGRAD_COMPILE_CACHE"]).rglob("*")
        if path.is_file() and ("fxgraph" in path.parts or path.suffix == ".so" if graphs else path.suffix == ".so")
        and ("altgrad" in path.parts) != graphs
    ]  # fmt: skip
    for path in found:
        {"cut": cut, "bit flipped": flip}[fault](path)
    _without(project.folder, ".dvc/cache", "data/runs", "dvc.lock")
    return bench.after(project, fault, f"{len(found)} files of {what}", "", bool(found), compiled=True)
