"""A recipe is added by params.yaml alone, as altgrad/config/README.md says. Oracle: the report that has it."""

import json

from tests.howto.conftest import blocks


def test_a_recipe_is_in_the_report_and_quantizes_what_it_says(copy) -> None:
    project = copy()
    (settings,) = blocks("config/README.md", "yaml", "How to add a recipe")
    project.settle(settings)
    assert "| **attention_only.E4M3** | adamw |" in project.repro()
    layers = json.loads((project.folder / "data/diag/attention_only.E4M3-adamw-0-1.json").read_text())["layers"]
    assert {name for name, layer in layers.items() if layer["formats"]["weight"]} == {
        "blocks.0.attn.qkv", "blocks.0.attn.out",
    }  # fmt: skip
    assert project.changed() == set()
