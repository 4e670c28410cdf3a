"""A package's page is no dependency of a stage. Oracles: DVC's hash of a folder, and its word on what it leaves out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from altgrad.common.files import read_yaml
from tests.pipeline.conftest import environment
from tests.test_pages import PAGES, ROOT

DVC = (sys.executable, "-m", "dvc")
HASH = """
import sys
from dvc.repo import Repo

repo = Repo()
out = next(iter(repo.index.stages)).deps[0]
print(out.get_hash().value)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of a project that has our .dvcignore and a stage that depends on the package."""
    subprocess.run([*DVC, "init", "--no-scm", "-q"], cwd=tmp_path, env=environment(), check=True, capture_output=True)
    (tmp_path / ".dvcignore").write_text((ROOT / ".dvcignore").read_text())
    (tmp_path / "dvc.yaml").write_text("stages: {a: {cmd: 'true', deps: [altgrad/numerics]}}")
    package = tmp_path / "altgrad/numerics"
    (package / "cpu").mkdir(parents=True)
    for name in ("rounding.py", "README.md", "cpu/kernels.cpp", "cpu/NOTES.md"):
        (package / name).write_text("as it was")
    return package


def hash_of(package: Path) -> str:
    command, folder = [sys.executable, "-c", HASH], package.parents[1]
    done = subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_hash_of_a_package_follows_its_code_and_not_its_pages(package: Path) -> None:
    before = hash_of(package)
    (package / "README.md").write_text("rewritten")
    (package / "cpu/NOTES.md").unlink()
    (package / "USE.md").write_text("new")
    assert hash_of(package) == before
    (package / "cpu/kernels.cpp").write_text("another loop")
    assert hash_of(package) != before


def test_every_page_is_left_out_and_nothing_else_of_a_package() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in [*PAGES, *(ROOT / "altgrad").rglob("*.py")]]
    command = [*DVC, "check-ignore", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False, capture_output=True, text=True)
    assert set(done.stdout.split()) == {path.relative_to(ROOT).as_posix() for path in PAGES}


def test_no_stage_names_a_page() -> None:
    stages = read_yaml(ROOT / "dvc.yaml")["stages"].values()
    assert not [dep for stage in stages for dep in stage["deps"] if dep.endswith(".md")]
