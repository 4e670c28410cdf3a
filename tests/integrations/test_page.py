"""The examples of the package's page run, one after the other, and leave runs that `make watch` shows. Oracle: it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from altgrad.watch.project import DIAGNOSED, Project
from tests.integrations.conftest import KEY

PAGE = Path(__file__).parents[2] / "altgrad/integrations/README.md"
SECTION = re.compile(r"^## (.*?)\n.*?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NEEDED = {"Hugging Face": ("transformers", "accelerate"), "PEFT": ("transformers", "peft"),
          "Lightning": ("lightning",), "Accelerate": ("transformers", "accelerate")}  # fmt: skip
RECORDED = {"A loop of your own": ("runs", 20), "Hugging Face": ("runs-huggingface", 4),
            "Lightning": ("runs-lightning", 4), "Accelerate": ("runs-accelerate", 4)}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_every_example_runs_and_what_it_records_is_seen(tmp_path, monkeypatch):
    for name in {name for names in NEEDED.values() for name in names}:
        pytest.importorskip(name, reason=f"needs {name}")
    monkeypatch.chdir(tmp_path)
    sections = dict(SECTION.findall(PAGE.read_text(encoding="utf-8").partition("## Files")[2]))
    assert sections.keys() == NEEDED.keys() | RECORDED.keys() | {"torchtitan"}
    names: dict[str, object] = {"__name__": "example"}
    for section, code in sections.items():
        exec(compile(code, f"{PAGE}: {section}", "exec"), names)
        if section in RECORDED:
            folder, steps = RECORDED[section]
            project = Project(tmp_path / folder)
            (change,) = project.look()
            assert (change.cell.key, change.cell.state, change.cell.step) == (KEY, DIAGNOSED, steps)
            assert [row.step for row in change.rows] == [*range(1, steps + 1)]
