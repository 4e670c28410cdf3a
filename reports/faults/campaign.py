"""Stops at chosen moments of `make repro`, and what came of each: the bits of an undisturbed run, or one sentence.

Oracle: the files of a run that nothing disturbed. Each case is a project of its own, in which a command is stopped or
something damaged (`damages`), and then one further command is run.
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
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import psutil

from tests.pipeline.conftest import Project, environment, results

COMMAND = [sys.executable, "-m", "altgrad.execution", "--jobs", "2"]
HOOK = Path(__file__).parent / "hook"
OWN_CACHE = {"ALTGRAD_COMPILE_CACHE": "scratch/own"}  # of what is compiled, in a project's own folder
LIMIT_S = 600
SENTENCES = ("interrupted; run the same command again", "interrupted; the checkpoints are saved", "error: ", "note: ")
UGLY = ("Traceback", "resource_tracker", "Exception ignored", "Error in atexit")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
EARLY = "tokenizing", "planning", "writing dvc.lock for the first time", "writing rwlock for the first time"
MOMENTS = {
    "tokenizing": r"data/tokens/train\.bin$",
    "planning": r"data/grid/index\.json$",
    "building the C++ loops": r"kernels-\w+\.so$",
    "compiling a graph": r"/fxgraph/",
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

    def __init__(self, folder: Path, finished: Path | None = None, planned: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if finished is None:
            finished = folder / "finished"
            shutil.copytree(self.fresh.folder, finished, symlinks=True)
            run(Project.at(finished))
        self.planned = Project.at(planned or folder / "planned")
        if planned is None:
            shutil.copytree(self.fresh.folder, self.planned.folder, symlinks=True)
            self.planned.repro("tokenize", "grid", "code")
        self.finished, self._expected = finished, results(Project.at(finished))
        assert self._expected
        self._count, self._lock = 0, Lock()

    @cached_property
    def fresh(self) -> Project:
        """A project that has never run."""
        return Project(self.folder / "fresh")

    @cached_property
    def compiles(self) -> Project:
        """A project that is about to train with compiled graphs, none of which is there."""
        project = self.copy(self.fresh.folder)
        project.set("train.compile", "on")
        project.repro("tokenize", "grid", "code")
        return project

    @cached_property
    def compiled(self) -> Project:
        """The same project, which has run."""
        project = self.copy(self.compiles.folder)
        run(project, **OWN_CACHE)
        return project

    def copy(self, source: Path) -> Project:
        """Return a copy of a project of its own."""
        with self._lock:
            self._count += 1
            target = self.folder / f"case-{self._count}"
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("done"))
        return Project.at(target)

    def after(
        self, project: Project, fault: str, moment: str, stopped: str, clean: bool = True, *,
        or_sentence: bool = False, compiled: bool = False,
    ) -> Outcome:  # fmt: skip
        """Run the command once more and say what came of it; the project is removed where that is well.

        The bits of a run that nothing disturbed, of `compiled` graphs or not, or one sentence where ``or_sentence``.
        """
        done = run(project, check=False, **(OWN_CACHE if compiled else {}))
        expected = results(self.compiled) if compiled else self._expected
        words = sentences(done.stderr)
        ugly = [word for word in UGLY if word in done.stderr]
        if done.returncode == 0:
            same = results(project) == expected
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


def begun(project: Project) -> subprocess.Popen[str]:
    """Start the command as a user does, in a process group of its own, and go on beside it."""
    return subprocess.Popen(
        COMMAND, cwd=project.folder, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip


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
    compiled = moment == "compiling a graph"
    source = bench.compiles if compiled else bench.fresh if moment in EARLY else bench.planned
    project = bench.copy(source.folder)
    done, fired = stop(project, moment, signum, **(OWN_CACHE if compiled or "loops" in moment else {}))
    expected = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[signum]
    words, ugly = sentences(done.stderr), [word for word in UGLY if word in done.stderr]
    said = f"exit {done.returncode}" + (f": {words[0]}" if words else "") + (f" ({', '.join(ugly)})" if ugly else "")
    clean = signum == signal.SIGKILL or (len(words) == 1 and not ugly)
    clean &= fired and done.returncode == expected
    return bench.after(project, signum.name, moment, said if fired else "NEVER THERE", clean, compiled=compiled)


def stop(
    project: Project, moment: str, signum: signal.Signals, **variables: str
) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run the command until it is sent ``signum`` at ``moment``; return how it ended, and whether the moment came."""
    place = project.folder / "scratch/fault"
    place.mkdir(parents=True)
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    fault = {"FAULT": MOMENTS[moment], "FAULT_SIGNAL": str(int(signum)), "FAULT_PLACE": str(place)}
    done = run(project, check=False, PYTHONPATH=path, **fault, **variables)
    end_children(project)
    return done, (place / "fired").exists()


def killed_by_chance(bench: Bench, seconds: float, number: int) -> Outcome:
    """Kill a command, and every other time all that it has started, after a time by chance of what it takes."""
    chance = random.Random(number)
    project = bench.copy(bench.fresh.folder)
    after, all_of_it = chance.uniform(0, seconds), number % 2 == 0
    process = begun(project)
    try:
        process.communicate(timeout=after)
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


def worker_killed(bench: Bench) -> Outcome:
    """Kill a process that trains, as the kernel does for want of memory."""
    project = bench.copy(bench.planned.folder)
    process = begun(project)
    while not list(project.folder.glob("scratch/*/step-*")) and process.poll() is None:
        time.sleep(0.01)
    for child in psutil.Process(process.pid).children(recursive=True):
        with _gone():
            if os.getsid(child.pid) == child.pid and not child.children():  # workers have sessions of their own
                child.kill()
                break
    _, errors = process.communicate(timeout=LIMIT_S)
    words = [sentence for sentence in sentences(errors) if sentence.startswith("error")]
    ugly = [word for word in UGLY if word in errors and word != "resource_tracker"]  # which says that it was killed
    clean = process.returncode in (0, 1) and not ugly
    return bench.after(project, "SIGKILL", "a process that trains", f"exit {process.returncode}: {words[:1]}", clean)


def two_at_once(bench: Bench) -> Outcome:
    """Run two commands at once; one of them may say that the other holds the lock."""
    project = bench.copy(bench.fresh.folder)
    two = [begun(project), begun(project)]
    ended = [process.communicate(timeout=LIMIT_S)[1] for process in two]
    clean = not any(word in text for text in ended for word in UGLY)
    said = ", ".join(f"exit {process.returncode}" for process in two)
    return bench.after(project, "two commands at once", "from the start", said, clean)


def sentences(text: str) -> list[str]:
    """Return the lines that the command said of its end."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    return [line for line in lines if line.startswith(SENTENCES) and not line.startswith("note: ")]
