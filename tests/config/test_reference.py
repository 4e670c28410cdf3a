"""The settings reference says of every setting what the declaration says, and is the one that is committed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from altgrad.config import __main__ as reference
from altgrad.config.__main__ import COMMAND, FOLDER, pages, sections
from altgrad.config.arms import Arm
from altgrad.config.params import Params
from altgrad.config.state import Moment, State


def test_the_pages_are_those_of_todays_declarations():
    kept = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert kept == pages(), f"run `{COMMAND} altgrad/config/settings`"


@pytest.mark.parametrize("section", sections())
def test_every_setting_says_what_it_is(section):
    assert sections()[section]["description"]
    for name, field in sections()[section]["properties"].items():
        assert field.get("description"), f"{section}.{name} has no description"


def test_every_section_of_the_file_has_a_page():
    short = {"task", "corpus", "model", "tracking", "start"}
    assert {f"{name}.md" for name in set(Params.model_fields) - short} | {"params.md"} == set(pages())


def test_a_row_has_values_range_default_and_words():
    page = pages()["optimizers.md"]
    assert "| `lr` | number, above 0, at most 1000000 | – | peak learning rate" in page
    assert "| `base` | `adamw` or `sgd` or `riemann_adam`" in page
    assert "| `betas` | 2 x number, at least 0, below 1 | the base's |" in page
    assert "| `plain_lr` | number, above 0, at most 1000000 or none | none |" in page
    settings = sum(len(section.model_fields) for section in (Arm, State, Moment))
    assert settings == sum(line.startswith("| `") for line in page.splitlines())
    assert "## TensorRecipe" in pages()["recipes.md"]


def test_the_command_prints_and_writes_them(tmp_path):
    command = [sys.executable, "-m", "altgrad.config", "--reference"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(text in printed for text in pages().values())
    subprocess.run([*command, str(tmp_path / "made")], check=True)
    assert {path.name for path in (tmp_path / "made").iterdir()} == set(pages())


def test_a_changed_declaration_changes_the_page(monkeypatch):
    before = pages()["monitor.md"]
    monkeypatch.setattr(reference, "LIMITS", {})
    assert pages()["monitor.md"] != before
