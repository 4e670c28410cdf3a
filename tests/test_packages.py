"""A stage depends on the packages that it imports, so that DVC reruns what a change can affect and nothing else.

Oracle: the import statements of the stage's script and of what they lead to.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from altgrad.common.files import read_yaml
from altgrad.common.fingerprint import PACKAGES, write_digests

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
    """Return the packages that ``script`` imports, directly or through others."""
    seen, left = set(), {script}
    while left:
        seen |= left
        left = {file for source in left for file in imported(source)} - seen
    return {"/".join(file.relative_to(ROOT).parts[:2]) for file in seen if len(file.relative_to(ROOT).parts) > 2}


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "code"])
def test_a_stage_depends_on_the_packages_that_it_imports_and_on_no_other(stage: str) -> None:
    """Stages with a run each name one file, which stands for the packages that `altgrad.common.fingerprint` lists."""
    script = STAGES[stage]["cmd"].split()[2].removeprefix("stages.")  # train for train_models too
    if script in PACKAGES:
        assert f"data/code/{script}.json" in STAGES[stage]["deps"]
        named = {f"altgrad/{name}" for name in PACKAGES[script]}
    else:
        named = {dep for dep in STAGES[stage]["deps"] if dep.startswith("altgrad/")}
    assert named == rooms_of(ROOT / f"stages/{script}.py")


@pytest.mark.parametrize(("package", "allowed"), [
    ("common", {"common"}),
    ("formats", {"common", "formats"}),
    ("config", {"common", "config", "formats"}),
    ("diagnostics", {"common", "formats", "config", "numerics", "data", "model", "optim", "metrics", "diagnostics"}),
    ("reporting", {"common", "formats", "config", "metrics", "reporting"}),
])  # fmt: skip
def test_a_package_imports_those_above_it_alone(package: str, allowed: set[str]) -> None:
    """But for a package's command, which may end in what a later package does; nothing imports it."""
    for source in {*(ROOT / "altgrad" / package).rglob("*.py")} - {ROOT / "altgrad" / package / "__main__.py"}:
        parts = [file.relative_to(ROOT / "altgrad").parts for file in imported(source)]
        assert {part[0] for part in parts if len(part) > 1} <= allowed, source


def test_the_digests_are_made_anew_when_any_of_what_they_stand_for_changes() -> None:
    of_packages = {f"altgrad/{name}" for names in PACKAGES.values() for name in names}
    scripts = {f"stages/{stage}.py" for stage in PACKAGES}
    assert set(STAGES["code"]["deps"]) == of_packages | scripts | {"stages/code.py"}


def test_a_digest_changes_with_a_file_its_name_and_nothing_else(tmp_path: Path) -> None:
    def digests() -> dict[str, str]:
        write_digests(tmp_path, tmp_path / "out")
        return {stage: (tmp_path / f"out/{stage}.json").read_text() for stage in PACKAGES}

    for name in {name for names in PACKAGES.values() for name in names}:
        (tmp_path / f"altgrad/{name}/cpu").mkdir(parents=True)
        (tmp_path / f"altgrad/{name}/cpu/a.cpp").write_text("one")
    (tmp_path / "stages").mkdir()
    for stage in PACKAGES:
        (tmp_path / f"stages/{stage}.py").write_text("one")
    before = digests()
    (tmp_path / "altgrad/optim/README.md").write_text("a page")
    (tmp_path / "altgrad/optim/__pycache__").mkdir()
    (tmp_path / "altgrad/optim/__pycache__/a.cpython-311.pyc").write_text("compiled")
    assert digests() == before
    (tmp_path / "altgrad/optim/cpu/a.cpp").rename(tmp_path / "altgrad/optim/cpu/b.cpp")
    renamed = digests()
    assert renamed["train"] != before["train"] and renamed["diagnose"] == before["diagnose"]
    for path, changed in {"altgrad/metrics/cpu/a.cpp": {"diagnose"}, "altgrad/model/cpu/a.cpp": set(PACKAGES),
                          "stages/train.py": {"train"}}.items():  # fmt: skip
        was = digests()
        (tmp_path / path).write_text("another")
        assert {stage for stage, text in digests().items() if text != was[stage]} == changed, path
