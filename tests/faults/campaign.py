"""Faults at chosen moments of `make repro`, and what came of each: the bits of an undisturbed run, or one sentence.

Oracle: the files of a run that nothing disturbed. Each case is a project of its own, in which a command is stopped or
something damaged, and then one further command is run.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.pipeline.conftest import Project, environment, results

COMMAND = [sys.executable, "-m", "altgrad.execution", "--jobs", "2"]
HOOK = Path(__file__).parent / "hook"
LIMIT_S = 300
SENTENCES = ("interrupted; run the same command again", "interrupted; the checkpoints are saved", "error: ", "note: ")
UGLY = ("Traceback", "resource_tracker", "Exception ignored", "Error in atexit")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EARLY = "tokenizing", "planning", "writing dvc.lock for the first time", "writing rwlock for the first time"
MOMENTS = {
    "tokenizing": r"data/tokens/train\.bin$",
    "planning": r"data/grid/index\.json$",
    "building the C++ loops": r"kernels-\w+\.so$",
    "writing a checkpoint": r"scratch/[^/]+/step-\w+\.safetensors$",
    "training, after a checkpoint": r"scratch/[^/]+/step-0*4\.\w+$",
    "writing a run's folder": r"data/runs/[^/]+/metrics\.json$",
    "writing dvc.lock for the first time": r"/dvc\.lock$",
    "writing dvc.lock": r"/dvc\.lock$",
    "writing rwlock for the first time": r"\.dvc/tmp/rwlock$",
    "writing rwlock": r"\.dvc/tmp/rwlock$",
    "writing the cache": r"\.dvc/cache/files/md5/",
    "writing the run cache": r"\.dvc/cache/runs/",
    "diagnosing": r"data/diag/[^/]+\.json$",
    "reporting": r"reports/REPORT\.md$",
}


class Outcome(NamedTuple):
    """A row of the table."""

    fault: str
    moment: str
    stopped: str  # how the disturbed command ended, and with which words
    outcome: str
    good: bool


class Bench:
    """The projects that cases start from: one that has never run, one that is about to train, and one that has run."""

    def __init__(self, folder: Path, finished: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.fresh = Project(folder / "fresh")
        if finished is None:
            finished = folder / "finished"
            shutil.copytree(self.fresh.folder, finished, symlinks=True)
            run(Project.at(finished))
        self.planned = Project.at(folder / "planned")
        shutil.copytree(self.fresh.folder, self.planned.folder, symlinks=True)
        self.planned.repro("tokenize", "grid", "code")
        self.finished, self.expected = finished, results(Project.at(finished))
        assert self.expected
        self._count = 0

    def copy(self, source: Path) -> Project:
        """Return a copy of a project of its own."""
        self._count += 1
        target = self.folder / f"case-{self._count}"
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("done"))
        return Project.at(target)

    def after(
        self, project: Project, fault: str, moment: str, stopped: str, clean: bool = True, *, or_sentence: bool = False
    ) -> Outcome:
        """Run the command once more and say what came of it; the project is removed where that is well.

        The bits of a run that nothing disturbed, ``or_sentence``: or one that says what to do.
        """
        done = run(project, check=False)
        words = _sentences(done.stderr)
        ugly = [word for word in UGLY if word in done.stderr]
        if done.returncode == 0:
            same = results(project) == self.expected
            outcome = "same bits" if same else "OTHER BITS"
        else:
            same = or_sentence and len(words) == 1 and not ugly
            outcome = f"exit {done.returncode}: {' / '.join(words) or done.stderr.strip()[-200:]}"
        if ugly:
            outcome += f" ({', '.join(ugly)})"
        good = clean and same and not ugly
        if good:
            shutil.rmtree(project.folder)
        return Outcome(fault, moment, stopped, outcome, good)


def run(project: Project, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process group of its own."""
    done = subprocess.run(
        COMMAND, cwd=project.folder, env=environment() | variables, capture_output=True, text=True, check=False,
        timeout=LIMIT_S, start_new_session=True,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


def stopped_at(bench: Bench, moment: str, signum: signal.Signals) -> Outcome:
    """Stop a command by ``signum`` at ``moment``, for most of which it is about to train."""
    project = bench.copy((bench.fresh if moment in EARLY else bench.planned).folder)
    place = project.folder / "scratch/fault"
    place.mkdir(parents=True)
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"ALTGRAD_COMPILE_CACHE": str(place / "compiled")} if "loops" in moment else {}
    done = run(
        project, check=False, PYTHONPATH=path, FAULT=MOMENTS[moment], FAULT_SIGNAL=str(int(signum)),
        FAULT_PLACE=str(place), **own,
    )  # fmt: skip
    fired = (place / "fired").exists()
    end_children(project)
    expected = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[signum]
    words, ugly = _sentences(done.stderr), [word for word in UGLY if word in done.stderr]
    said = f"exit {done.returncode}" + (f": {words[0]}" if words else "") + (f" ({', '.join(ugly)})" if ugly else "")
    clean = signum == signal.SIGKILL or (len(words) == 1 and not ugly)
    clean &= fired and done.returncode == expected
    return bench.after(project, signum.name, moment, said if fired else "NEVER THERE", clean)


def killed_by_chance(bench: Bench, seconds: float, number: int) -> Outcome:
    """Kill a command, and every other time all that it has started, after a time by chance of what it takes."""
    chance = random.Random(number)
    project = bench.copy(bench.fresh.folder)
    after, all_of_it = chance.uniform(0, seconds), number % 2 == 0
    process = subprocess.Popen(
        COMMAND, cwd=project.folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.wait(after)
        stopped = "had ended"
    except subprocess.TimeoutExpired:
        started = psutil.Process(process.pid).children(recursive=True) if all_of_it else []
        process.kill()
        for child in started:
            with _gone():
                child.kill()
        process.wait()
        stopped = "killed with all that it had started" if all_of_it else "killed alone"
    end_children(project)
    return bench.after(project, "SIGKILL", f"by chance, after {after:.1f} of {seconds:.0f} s", stopped)


def end_children(project: Project) -> None:
    """Wait until no process works in the project any more: what a killed command leaves ends by itself."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends and any(_works_in(process, project.folder) for process in psutil.process_iter()):
        time.sleep(0.1)


def _works_in(process: psutil.Process, folder: Path) -> bool:
    with _gone():
        return process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder
    return False


def _gone() -> suppress:
    """Pass over a process that has ended meanwhile."""
    return suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError)


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


def damaged_loops(bench: Bench, fault: str) -> Outcome:
    """Damage the loops in C++ that were built, and train anew."""
    project = bench.copy(bench.planned.folder)
    cache = project.folder / "scratch/compiled"
    shutil.copytree(Path(os.environ.get("ALTGRAD_COMPILE_CACHE", "scratch/compiled")), cache, dirs_exist_ok=True)
    found = list(cache.rglob("altgrad/*.so"))
    for path in found:
        {"cut": cut, "bit flipped": flip}[fault](path)
    first = run(project, check=False, ALTGRAD_COMPILE_CACHE=str(cache))
    words = _sentences(first.stderr)
    return bench.after(project, fault, f"{len(found)} libraries of loops in C++", " / ".join(words), bool(found))


def worker_killed(bench: Bench) -> Outcome:
    """Kill a process that trains, as the kernel does for want of memory."""
    project = bench.copy(bench.planned.folder)
    process = subprocess.Popen(
        COMMAND, cwd=project.folder, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not list(project.folder.glob("scratch/*/step-*")) and process.poll() is None:
        time.sleep(0.01)
    for child in psutil.Process(process.pid).children(recursive=True):
        with _gone():
            if os.getsid(child.pid) == child.pid and not child.children():  # workers have sessions of their own
                child.kill()
                break
    _, errors = process.communicate(timeout=LIMIT_S)
    words = [sentence for sentence in _sentences(errors) if sentence.startswith("error")]
    ugly = [word for word in UGLY if word in errors and word != "resource_tracker"]  # which says that it was killed
    clean = process.returncode in (0, 1) and not ugly
    return bench.after(project, "SIGKILL", "a process that trains", f"exit {process.returncode}: {words[:1]}", clean)


def two_at_once(bench: Bench) -> Outcome:
    """Run two commands at once; one of them may say that the other holds the lock."""
    project = bench.copy(bench.fresh.folder)
    two = [
        subprocess.Popen(COMMAND, cwd=project.folder, env=environment(), stderr=subprocess.PIPE,
                         stdout=subprocess.DEVNULL, text=True, start_new_session=True)
        for _ in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=LIMIT_S)[1] for process in two]
    clean = not any(word in text for text in ended for word in UGLY)
    said = ", ".join(f"exit {process.returncode}" for process in two)
    return bench.after(project, "two commands at once", "from the start", said, clean)


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
        words, ugly = _sentences(done.stderr), [word for word in UGLY if word in done.stderr]
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
        words = _sentences(done.stderr)
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


def _sentences(text: str) -> list[str]:
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line.startswith(SENTENCES) and not line.startswith("note: ")]
