"""What a page says about adding a thing, followed to the letter in a copy of this project that trains in seconds.

The stages run one after the other in one process, as their scripts do; that DVC starts the same ones is tested in
tests/pipeline.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.pipeline.conftest import Project, environment

ROOT = Path(__file__).parents[2]
STAGES = """
import json
from pathlib import Path
from stages import diagnose, grid, report, tokenize, train

if not Path("data/tokens").exists():
    tokenize.main([])
grid.main([])
for key in json.loads(Path("data/grid/index.json").read_text())["cells"]:
    if not Path("data/runs", key).exists():
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
    """A copy of the project whose small grid has been trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *command: str) -> str:
        """Run a Python command in the folder, which must succeed; return what it printed."""
        command = (sys.executable, *command)
        done = subprocess.run(command, cwd=self.folder, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    def repro(self) -> str:
        """Run every stage that is due; return the report."""
        self.run("-c", STAGES)
        cells = json.loads((self.folder / "reports/metrics.json").read_text())["cells"]
        assert cells["completed"] == cells["total"] > 0, cells
        return (self.folder / "reports/REPORT.md").read_text(encoding="utf-8")

    def settle(self, block: str) -> None:
        """Put the settings of a YAML block into params.yaml."""
        yaml, file = YAML(), self.folder / "params.yaml"
        params = yaml.load(file)
        _put(params, YAML(typ="safe").load(block))
        with open(file, "w") as stream:
            yaml.dump(params, stream)

    def changed(self) -> set[str]:
        """Return the sources that differ from this checkout's."""
        found = set()
        for path in [*self.folder.glob("altgrad/**/*.*"), *self.folder.glob("stages/*.py")]:
            name = path.relative_to(self.folder)
            if "__pycache__" not in path.parts and path.is_file():
                original = ROOT / name
                if not original.is_file() or original.read_bytes() != path.read_bytes():
                    found.add(name.as_posix())
        return found


def _put(params: Any, settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        if isinstance(value, dict) and name in params:
            _put(params[name], value)
        else:
            params[name] = value


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project whose grid of two cells has been trained, uncompiled. Shared: tests work on copies."""
    project = Project(tmp_path_factory.mktemp("howto") / "project", git=False)
    project.set("train.compile", "off")
    project.set("train.steps", 4)
    Copy(project.folder).repro()
    return project.folder


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Callable[[], Copy]:
    """Return a function that makes a copy of the trained project."""

    def make() -> Copy:
        shutil.copytree(trained, tmp_path / "copy")
        return Copy(tmp_path / "copy")

    return make
