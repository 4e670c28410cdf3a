"""What a page says about adding a thing, followed to the letter in a copy of this project that trains in seconds.

All pages but the one on a new base are followed in one copy, which is run once: the lists of the grid are joined. The
stages run one after the other in one process, as their scripts do; that DVC starts the same ones is tested in
tests/pipeline.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ruamel.yaml import YAML

from tests.pipeline.conftest import Project, environment

ROOT = Path(__file__).parents[2]
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


class Copy:
    """A copy of the project with a grid of one arm, one seed, ``bf16`` and ``E4M3``, uncompiled."""

    def __init__(self, folder: Path) -> None:
        project = Project(folder, git=False)
        project.set("train.compile", "off")
        project.set("train.steps", 4)
        self.folder = folder

    def run(self, *command: str) -> str:
        """Run a Python command in the folder, which must succeed; return what it printed."""
        command = (sys.executable, *command)
        done = subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def repro(self) -> str:
        """Run every stage; return the report."""
        self.run("-c", STAGES)
        cells = json.loads((self.folder / "reports/metrics.json").read_text())["cells"]
        assert cells["completed"] == cells["total"] > 0, cells
        return (self.folder / "reports/REPORT.md").read_text(encoding="utf-8")

    def settle(self, block: str) -> None:
        """Put the settings of a YAML block into params.yaml, what its lists have at the end of those that are there."""
        yaml, file = YAML(), self.folder / "params.yaml"
        params = yaml.load(file)
        _put(params, YAML(typ="safe").load(block))
        with open(file, "w") as stream:
            yaml.dump(params, stream)

    def changed(self) -> set[str]:
        """Return the sources that differ from this checkout's."""
        folder = self.folder
        files = [*folder.glob("altgrad/**/*.*"), *folder.glob("stages/*.py"), folder / "dvc.yaml"]
        names = [path.relative_to(folder) for path in files if "__pycache__" not in path.parts and path.is_file()]
        return {name.as_posix() for name in names if _content(ROOT / name) != _content(folder / name)}


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
    """A copy in which pages have been followed, its report, and the sources that they changed."""

    project: Copy
    report: str
    changed: set[str]


@pytest.fixture(scope="session")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """Return a project to which a format, a recipe, an arm, a corpus, a metric and a figure have been added."""
    project = Copy(tmp_path_factory.mktemp("howto") / "project")
    for page, thing in (("formats", "a format"), ("config", "a recipe"), ("optim", "an arm"), ("data", "a corpus")):
        (settings,) = blocks(f"{page}/README.md", "yaml", f"How to add {thing}")
        project.settle(settings)
    assert project.changed() == set()  # params.yaml alone
    for page, thing in (("diagnostics", "metric"), ("reporting", "figure")):
        (source,) = blocks(f"{page}/README.md", "python", f"How to add a {thing}")
        (name,) = set(re.findall(r"This is `([\w/]+\.py)`:", (ROOT / f"altgrad/{page}/README.md").read_text()))
        (project.folder / "altgrad" / page / name).write_text(source)
    return Followed(project, project.repro(), project.changed())
