"""The examples of the package's page run, one after the other, and leave runs that `make watch` shows. Oracle: it.

The page names the versions that are installed. Oracle: their metadata.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from altgrad.watch import DIAGNOSED, Project
from tests.integrations.conftest import KEY

PAGE = Path(__file__).parents[2] / "altgrad/integrations/README.md"
SECTION = re.compile(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
VERSIONS = dict(re.findall(r"`([\w-]+)`\s(\d+[.\d]*\d)", PAGE.read_text(encoding="utf-8")))
NEEDED = {"Hugging Face": ("transformers", "accelerate"), "PEFT": ("transformers", "peft"),
          "Lightning": ("lightning",), "Accelerate": ("transformers", "accelerate"),
          "torchtitan": ("torchtitan",)}  # fmt: skip
TRACKED = ("torchao", "tensorboard", "mlflow-skinny", "wandb", "ray")  # which have pages of their own
RECORDED = {"A loop of your own": ("runs", 20), "Hugging Face": ("runs-huggingface", 4),
            "Lightning": ("runs-lightning", 4), "Accelerate": ("runs-accelerate", 4)}  # fmt: skip


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def test_the_page_has_a_version_of_every_integration():
    assert VERSIONS.keys() == {name for names in NEEDED.values() for name in names} | set(TRACKED)


@pytest.mark.parametrize("package", VERSIONS)
def test_the_page_names_the_version_that_is_installed(package):
    found, tried = installed(package), VERSIONS[package]
    if found is None:
        pytest.skip(f"needs {package}")
    assert found == tried, f"{PAGE.name} says {package} {tried}, and {found} is installed: run its tests, name {found}"


@pytest.mark.filterwarnings("ignore")
def test_every_example_runs_and_what_it_records_is_seen(tmp_path, monkeypatch):
    for name in {name for names in NEEDED.values() for name in names} - {"torchtitan"}:
        pytest.importorskip(name, reason=f"needs {name}")
    monkeypatch.chdir(tmp_path)
    sections = dict(SECTION.findall(PAGE.read_text(encoding="utf-8").partition("## Files")[2]))
    assert sections.keys() == NEEDED.keys() | RECORDED.keys()
    names: dict[str, object] = {"__name__": "example"}
    for section, code in sections.items():
        if section == "torchtitan" and installed("torchtitan") is None:
            continue
        exec(compile(code, f"{PAGE}: {section}", "exec"), names)
        if section in RECORDED:
            folder, steps = RECORDED[section]
            project = Project(tmp_path / folder)
            (change,) = project.look()
            assert (change.cell.key, change.cell.state, change.cell.step) == (KEY, DIAGNOSED, steps)
            assert [row.step for row in change.rows] == [*range(1, steps + 1)]
