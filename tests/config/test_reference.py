"""The settings reference says of every setting what the declaration says, and is the one that is committed."""

from __future__ import annotations

import subprocess
import sys

from altgrad.config.__main__ import COMMAND, FOLDER, pages, sections
from altgrad.config.arms import Arm
from altgrad.config.params import Params
from altgrad.config.state import Moment, State


def test_the_pages_are_those_of_todays_declarations(tmp_path):
    kept = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert kept == pages(), f"run `{COMMAND}`"
    subprocess.run([sys.executable, "-m", "altgrad.config", "--reference", str(tmp_path / "made")], check=True)
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "made").iterdir()} == kept
    short = {"task", "corpus", "model", "tracking", "start"}
    assert {f"{name}.md" for name in set(Params.model_fields) - short} | {"params.md"} == set(kept)


def test_every_setting_says_what_it_is():
    for name, section in sections().items():
        assert section["description"], name
        assert all(field.get("description") for field in section["properties"].values()), name


def test_a_row_has_values_range_default_and_words():
    page = pages()["optimizers.md"]
    assert "| `lr` | number, above 0, at most 1000000 | – | peak learning rate" in page
    assert "| `base` | `adamw` or `sgd` or `riemann_adam`" in page
    assert "| `betas` | 2 x number, at least 0, below 1 | the base's |" in page
    assert "| `plain_lr` | number, above 0, at most 1000000 or none | none |" in page
    settings = sum(len(section.model_fields) for section in (Arm, State, Moment))
    assert settings == sum(line.startswith("| `") for line in page.splitlines())
    assert "## TensorRecipe" in pages()["recipes.md"]
