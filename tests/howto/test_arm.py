"""An arm of known parts is params.yaml alone, one with a new base three files. Oracle: the report, and the laws."""

import shutil
import subprocess

import pytest

from tests.howto.conftest import ROOT, blocks

FILES = {"altgrad/config/arms.py", "altgrad/optim/update.py", "altgrad/optim/update_cpu.cpp"}


def test_a_new_combination_is_in_the_report(copy) -> None:
    project = copy()
    (settings,) = blocks("optim/README.md", "yaml", "How to add an arm")
    project.settle(settings)
    assert "| **E4M3** | stiff_fading |" in project.repro()
    assert project.changed() == set()


@pytest.mark.slow  # builds the loops anew
def test_a_new_base_takes_three_files_and_is_held_to_the_law_of_the_loops(copy) -> None:
    project = copy()
    for patch in blocks("optim/ADD_A_BASE.md", "diff"):
        subprocess.run(["git", "apply", "-"], cwd=project.folder, input=patch, text=True, check=True)
    assert project.changed() == FILES
    (settings,) = blocks("optim/ADD_A_BASE.md", "yaml")
    project.settle(settings)
    for name in ("__init__.py", "conftest.py", "optim"):
        source, target = ROOT / "tests" / name, project.folder / "tests" / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    shutil.copy(ROOT / "pyproject.toml", project.folder)
    (command,) = blocks("optim/ADD_A_BASE.md", "console")
    said = project.run(*command.removeprefix("$ python ").split(), "-p", "no:cacheprovider", "-m", "not slow")
    assert " passed" in said and "skipped" not in said
    assert "| **E4M3** | lion |" in project.repro()
