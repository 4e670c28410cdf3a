"""No stage depends on `altgrad.execution`, which needs only the settings; two files need DVC. Oracle: the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_packages import ROOT, imported

PACKAGE = ROOT / "altgrad/execution"
FILES = sorted(PACKAGE.glob("*.py"))


def names_imported(source: Path) -> set[str]:
    """Return the packages that ``source`` imports, anywhere in it."""
    nodes = list(ast.walk(ast.parse(source.read_text())))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {module.split(".")[0] for module in modules}


def test_no_stage_imports_it_and_of_the_packages_only_those_around_a_run():
    sources = [*(ROOT / "altgrad").rglob("*.py"), *(ROOT / "stages").rglob("*.py")]
    outside = [source for source in sources if PACKAGE not in source.parents]
    users = [source for source in outside if any(PACKAGE in file.parents for file in imported(source))]
    assert {file.relative_to(ROOT / "altgrad").parts[0] for file in users} == {"benchmark", "stability", "watch"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_imports_the_settings_and_no_other_package(file: Path):
    """But for a node, which asks training for the class of its machine."""
    packages = {found.relative_to(ROOT / "altgrad").parts[0] for found in imported(file)}
    assert packages <= {"execution", "config", "formats", "common"} | (
        {"model", "training"} if file.stem == "node" else set()
    )


def test_two_files_use_the_inner_modules_of_dvc():
    users = [file.name for file in FILES if {"dvc", "dvc_objects"} & names_imported(file)]
    assert users == ["dvc_api.py", "dvc_files.py"]


def test_its_files_import_one_another_in_one_direction():
    left = {file: {found for found in imported(file) if found in FILES and found != file} for file in FILES}
    while free := [file for file, needs in left.items() if not needs & left.keys()]:
        for file in free:
            del left[file]
    assert not left, "these import one another in a circle"


def test_the_readme_has_a_row_for_every_file():
    text = (PACKAGE / "README.md").read_text()
    assert not [file.name for file in FILES if file.name != "__init__.py" and f"| `{file.name}` |" not in text]
