"""A stage depends on the rooms that it imports, so that DVC reruns what a change can affect and nothing else.

Oracle: the import statements of the stage's script and of what they lead to.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from altgrad.config.files import read_yaml

ROOT = Path(__file__).parents[1]
STAGES = read_yaml(ROOT / "dvc.yaml")["stages"]


def source_of(module: str) -> Path | None:
    """Return the file of a module of this project, None for others and for names that are no module."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imported(source: Path) -> set[Path]:
    """Return the project's files that ``source`` imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {file for name in names if name.split(".")[0] == "altgrad" and (file := source_of(name))}


def rooms_of(script: Path) -> set[str]:
    """Return the rooms that ``script`` imports, directly or through others."""
    seen, left = set(), {script}
    while left:
        seen |= left
        left = {file for source in left for file in imported(source)} - seen
    return {"/".join(file.relative_to(ROOT).parts[:2]) for file in seen if len(file.relative_to(ROOT).parts) > 2}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_the_rooms_that_it_imports_and_on_no_other(stage: str) -> None:
    named = {dep for dep in STAGES[stage]["deps"] if dep.startswith("altgrad/")}
    assert named == rooms_of(ROOT / f"stages/{stage}.py")
