"""Follows what the "how to add" pages say, to the letter, in a copy of this project that trains in seconds.

One copy gets everything that a report shows and is run once. Its stages and the commands of the pages run in one
process; tests/pipeline tests that DVC starts the same stages. A base, a rounding mode and a kind of layer, which no
report shows, have a copy each.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.pipeline.conftest import Project, environment

ROOT = Path(__file__).parents[2]
COMMANDS = """
import runpy
import sys

for name, *arguments in {commands}:
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code, end.code
"""
STAGES = """
import json
from pathlib import Path
from stages import diagnose, grid, report, tokenize, train

tokenize.main([])
grid.main([])
for key in json.loads(Path("data/grid/index.json").read_text())["cells"]:
    train.main([key])
    diagnose.main([key])
report.main([])
"""


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """Return the code in this language on a page under altgrad/, all of it or that below a heading."""
    text = (ROOT / "altgrad" / page).read_text(encoding="utf-8")
    if heading:
        (text,) = re.findall(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def own_file(page: str, heading: str) -> tuple[str, str]:
    """Return the name and the content of the file that a page adds."""
    (source,) = blocks(page, "python", heading)
    (name,) = set(re.findall(r"This is `([\w/]+\.py)`:", (ROOT / "altgrad" / page).read_text(encoding="utf-8")))
    return name, source


class Sources:
    """A copy of the package."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT / "altgrad", folder / "altgrad", ignore=shutil.ignore_patterns("__pycache__"))
        self.folder = folder

    def patch(self, page: str, heading: str = "") -> None:
        """Apply the patches of a page."""
        for patch in blocks(page, "diff", heading):
            subprocess.run(["git", "apply", "-"], cwd=self.folder, input=patch, text=True, check=True)

    def contents(self) -> dict[str, bytes | None]:
        """Return the content of every source, by its path."""
        folder = self.folder
        files = [*folder.glob("altgrad/**/*.*"), *folder.glob("stages/*.py"), folder / "dvc.yaml"]
        paths = [path for path in files if "__pycache__" not in path.parts and path.is_file()]
        return {path.relative_to(folder).as_posix(): _content(path) for path in paths}

    def changed(self) -> set[str]:
        """Return the sources that differ from this checkout's."""
        return {name for name, content in self.contents().items() if content != _content(ROOT / name)}

    def run(self, *command: str) -> str:
        """Run a Python command in the folder, which must succeed; return what it printed."""
        command = (sys.executable, *command)
        done = subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def take_tests(self, package: str) -> None:
        """Take the tests of a package along."""
        for name in ("__init__.py", "conftest.py", package):
            source, target = ROOT / "tests" / name, self.folder / "tests" / name
            target.parent.mkdir(exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        shutil.copy(ROOT / "pyproject.toml", self.folder)


class Copy(Sources):
    """A copy of the project with a grid of one arm, one seed, ``bf16`` and ``E4M3``, uncompiled."""

    def __init__(self, folder: Path) -> None:
        project = Project(folder, git=False)
        project.set("train.compile", "off")
        project.set("train.steps", 4)
        self.folder = folder

    def repro(self, *places: tuple[str, str], then: str = "") -> tuple[str, str]:
        """Run the commands below these headings of pages, every stage, and then code, in one process.

        Returns the report, and what was printed.
        """
        lines = [line for page, heading in places for line in "".join(blocks(page, "console", heading)).splitlines()]
        commands = [line.removeprefix("$ python -m ").split() for line in lines]
        said = self.run("-c", COMMANDS.format(commands=commands) + STAGES + then)
        cells = json.loads((self.folder / "reports/summary.json").read_text())["cells"]
        assert cells["completed"] == cells["total"] > 0, cells
        return (self.folder / "reports/REPORT.md").read_text(encoding="utf-8"), said

    def settle(self, block: str, file: str = "params.yaml") -> None:
        """Put the settings of a YAML block into params.yaml, what its lists have at the end of those that are there.

        With ``file``, params.yaml stays and the outcome is written there.
        """
        yaml = YAML()
        params = yaml.load(self.folder / "params.yaml")
        _put(params, YAML(typ="safe").load(block))
        (self.folder / file).parent.mkdir(exist_ok=True)
        with open(self.folder / file, "w") as stream:
            yaml.dump(params, stream)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _put(params: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, dict) and name in params:
            _put(params[name], value)
        elif isinstance(value, list) and name in params:
            params[name] = [*params[name], *(entry for entry in value if entry not in params[name])]
        else:
            params[name] = value


class Followed(NamedTuple):
    """A copy in which the pages have been followed."""

    project: Sources
    report: str
    changes: dict[str, set[str]]  # by what a page adds, the sources that it changes
    said: str  # what was printed


# Metrics are printed, and a second corpus is made into tokens beside the first one, which the cells were trained on.
ELSEWHERE = """
import os
from altgrad.config import UserError, load_params
from altgrad.config.schema import PackageCorpus
from altgrad.data import documents
from altgrad.metrics.__main__ import main

main()
os.chdir("elsewhere")
tokenize.main([])
try:
    list(documents(PackageCorpus(source="package", name="asincio"), "train"))
except UserError as error:
    print(error)
Path("params.yaml").write_text(Path("params.yaml").read_text().replace("source: package", ""))
try:
    load_params()
except UserError as error:
    print(error)
"""


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Return a project to which one of each thing has been added, for all test processes: the first to ask makes it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "followed"
    folder, kept = shared / "project", shared / "said.json"
    with open(shared.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            report, changes, said = follow(Copy(folder))
            kept.write_text(json.dumps([report, {thing: sorted(names) for thing, names in changes.items()}, said]))
    report, changes, said = json.loads(kept.read_text())
    project = Sources.__new__(Sources)
    project.folder = folder
    return Followed(project, report, {thing: set(names) for thing, names in changes.items()}, said)


def follow(project: Copy) -> tuple[str, dict[str, set[str]], str]:
    """Add one of each thing that a report shows; return the report, what each page changed, and what was printed."""
    for page, thing in (("formats", "a format"), ("config", "a recipe"), ("optim", "an arm"), ("data", "a corpus")):
        (settings,) = blocks(f"{page}/README.md", "yaml", f"How to add {thing}")
        project.settle(settings)
    assert project.changed() == set()  # params.yaml alone
    changes: dict[str, set[str]] = {}
    for package, thing, has_file in (
        ("diagnostics", "a metric", True), ("reporting", "a figure", True), ("config", "a setting", False),
        ("training", "a live metric", False), ("benchmark", "a part", True), ("data", "a source", True),
    ):  # fmt: skip
        page, heading, before = f"{package}/README.md", f"How to add {thing}", project.contents()
        project.patch(page, heading)
        if has_file:
            name, source = own_file(page, heading)
            (project.folder / "altgrad" / package / name).write_text(source)
        changes[thing] = {name for name, now in project.contents().items() if now != before.get(name)}
    places = [(f"{package}/README.md", f"How to add {thing}") for package, thing in (("config", "a setting"),
              ("benchmark", "a part"), ("data", "a source"))]  # fmt: skip
    project.settle(*blocks("config/README.md", "yaml", "How to add a setting"))
    project.settle(*blocks("data/README.md", "yaml", "How to add a source"), file="elsewhere/params.yaml")
    report, said = project.repro(*places, then=ELSEWHERE)
    return report, changes, said
