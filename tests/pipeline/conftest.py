"""The real pipeline in miniature: this checkout's code and dvc.yaml, a grid that trains in seconds."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

PROJECT = Path(__file__).parents[2]
COPIED = [
    "altgrad",
    "stages",
    ".dvc/config",
    ".dvc/plots",
    ".dvcignore",
    ".gitignore",
    "data/corpus/.gitkeep",
    "data/formats/.gitkeep",
    "data/weights/.gitkeep",
    "dvc.yaml",
    "params.yaml",
    "reports/simulation.csv",
    "reports/study/default-rates.yaml",
    "reports/study/results",
]
CELLS = ["bf16-adamw-0-1", "E4M3-adamw-0-1"]


def environment() -> dict[str, str]:
    """Return the environment of a user in this virtual environment, with one thread and no telemetry."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"PATH": path, "OMP_NUM_THREADS": "1", "DVC_NO_ANALYTICS": "1"}
    return {**{k: v for k, v in os.environ.items() if k != "DVC_ROOT"}, **settings}


class Project:
    """A project folder of its own, under git and DVC, with the commands that a user would give."""

    def __init__(self, folder: Path, *, git: bool = True) -> None:
        self.folder = folder
        for name in COPIED:
            source, target = PROJECT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                # With what Python has compiled, which a dozen processes would each do again, but nothing half written.
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.pyc.*", "vega.js"))
            else:
                shutil.copy(source, target)
        self._shrink()
        if git:
            self.run("git", "init", "--quiet")
            self.run("git", "add", "--all")
            self.run("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "start")

    @classmethod
    def at(cls, folder: Path) -> Project:
        """Return the project that is in ``folder`` already."""
        project = cls.__new__(cls)
        project.folder = folder
        return project

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder; with ``check``, it must succeed."""
        done = subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def repro(self, *stages: str) -> set[str]:
        """Run ``dvc repro``, or its part up to ``stages``; return the stages that really ran."""
        return set(re.findall(r"^Running stage '([^']+)'", self.run("dvc", "repro", *stages).stdout, re.MULTILINE))

    def set(self, path: str, value: Any) -> None:
        """Set ``section.setting`` of params.yaml, leaving its comments and its order alone."""
        self.set_all({path: value})

    def set_all(self, settings: dict[str, Any]) -> None:
        """Set all of them: the file is read and written once."""
        yaml, file = YAML(), self.folder / "params.yaml"
        content = yaml.load(file)
        for path, value in settings.items():
            *sections, setting = path.split(".")
            section = content
            for name in sections:
                section = section[name]
            section[setting] = value
        with open(file, "w") as stream:
            yaml.dump(content, stream)

    def append(self, name: str, text: str) -> None:
        """Add ``text`` at the end of a file."""
        with open(self.folder / name, "a") as file:
            file.write(text)

    def _shrink(self) -> None:
        words = "the licensee shall not be held liable for any use of the software under this licence"
        words = words.split()
        text = "\n\n".join(" ".join(words[i % 13 :] + words[: i % 7]) + f" {i}." for i in range(400))
        (self.folder / "data/corpus/mine.txt").write_text(text)
        self.set_all({
            "corpora.mine": {"source": "local", "path": "data/corpus/mine.txt"},
            "models.tiny": {"layers": 1, "width": 16, "heads": 2, "context": 16},
            "corpus": "mine", "model": "tiny", "tokenizer.vocab_size": 300,
            "grid.formats": ["bf16", "E4M3"], "grid.optimizers": ["adamw"], "grid.seeds": [0],
            "train.steps": 6, "train.batch": 4, "train.log_every": 2, "train.eval_every": 3,
            "train.eval_sequences": 8, "train.checkpoint_every": 2, "monitor.every": 3,
        })  # fmt: skip


def results(project: Project) -> dict[str, bytes]:
    """Return every file of every run and its diagnosis but the timings."""
    data = project.folder / "data"
    files = [*(data / "runs").rglob("*.*"), *(data / "diag").glob("*.*")]
    return {str(p.relative_to(data)): p.read_bytes() for p in files if p.name != "timing.json"}


def stages_of(*cells: str) -> set[str]:
    """Return the training and diagnosis stages of ``cells``."""
    return {f"{stage}@{cell}" for cell in cells for stage in ("train", "diagnose")}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a project whose pipeline has run once, for all test processes; the first to ask makes it.

    Beside it is ``planned``, the same before a cell was trained.
    """
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "finished"
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "done").exists():
            project, early = Project(shared), {"tokenize", "grid", "code"}
            assert project.repro(*early) == early
            shutil.copytree(shared, shared.with_name("planned"), symlinks=True)
            assert project.repro() == {"report"} | stages_of(*CELLS)
            (shared / "done").touch()
    return shared


@pytest.fixture(scope="session")
def planned(finished: Path) -> Path:
    """Return the folder of a project that is about to train, for all test processes."""
    return finished.with_name("planned")


@pytest.fixture(scope="module")
def project(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return a project whose pipeline has run once."""
    folder = tmp_path_factory.mktemp("project") / "copy"
    shutil.copytree(finished, folder, symlinks=True, ignore=shutil.ignore_patterns("done"))
    return Project.at(folder)
