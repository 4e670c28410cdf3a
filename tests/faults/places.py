"""File systems that are full, or that may not be written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.faults.campaign import UGLY, Bench, Outcome, end_children, run, sentences
from tests.pipeline.conftest import Project


def disk_full(bench: Bench, free_mb: float) -> Outcome:
    """Run on a file system with so many MB (10^6 bytes) free, then with room enough."""
    place = bench.folder / f"full-{free_mb:g}"
    place.mkdir()
    used = sum(path.stat().st_size for path in bench.fresh.folder.rglob("*") if path.is_file())
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(place)], check=True)
    try:
        shutil.copytree(bench.fresh.folder, place / "project", symlinks=True)
        taken = shutil.disk_usage(place).used
        resized(place, taken + int(free_mb * 1e6))
        project = Project.at(place / "project")
        done = run(project, check=False)
        end_children(project)
        words, ugly = sentences(done.stderr), [word for word in UGLY if word in done.stderr]
        said = f"exit {done.returncode}" + (f": {words[-1]}" if words else "") + (f" ({ugly})" if ugly else "")
        resized(place, taken + used + (1 << 30))
        outcome = bench.after(project, "disk full", f"{free_mb:g} MB free", said, not ugly)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)
    return outcome


def resized(place: Path, size: int) -> None:
    """Give the file system at ``place`` a size in bytes."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def read_only(bench: Bench) -> Outcome:
    """Run on a file system that may not be written, then on one that may."""
    place = bench.folder / "read-only"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(place)], check=True)
    try:
        shutil.copytree(bench.fresh.folder, place / "project", symlinks=True)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        project = Project.at(place / "project")
        done = run(project, check=False)
        words = sentences(done.stderr)
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        clean = len(words) == 1 and not any(word in done.stderr for word in UGLY)
        return bench.after(project, "read-only", "the whole project", f"exit {done.returncode}: {words[:1]}", clean)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


def may_mount(folder: Path) -> bool:
    """Whether this process may mount a file system."""
    place = folder / "may-mount"
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], capture_output=True, check=False)
    subprocess.run(["umount", str(place)], capture_output=True, check=False)
    return done.returncode == 0
