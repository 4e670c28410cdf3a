"""A format, a recipe, an arm and a corpus are added by params.yaml alone, as the pages say. Oracle: the report.

That no source changes is asserted where the pages are followed.
"""

import json


def test_a_format_of_ones_own_is_in_the_report(followed) -> None:
    assert "| **low** | adamw |" in followed.report  # the table of results


def test_the_format_has_the_facts_of_the_page(followed) -> None:
    cell = json.loads((followed.project.folder / "data/grid/low-adamw-0-1.json").read_text())
    facts = {"exponent_bits": 4, "mantissa_bits": 3, "bias": 11, "specials": "finite"}
    assert facts.items() <= cell["formats"]["low"].items()


def test_a_recipe_is_in_the_report_and_quantizes_what_it_says(followed) -> None:
    assert "| **attention_only.E4M3** | adamw |" in followed.report.replace("\\_", "_")
    diagnosis = followed.project.folder / "data/diag/attention_only.E4M3-adamw-0-1.json"
    layers = json.loads(diagnosis.read_text())["layers"]
    quantized = {name for name, layer in layers.items() if layer["formats"]["weight"]}
    assert quantized == {"blocks.0.attn.qkv", "blocks.0.attn.out"}


def test_a_new_combination_of_settings_is_in_the_report(followed) -> None:
    assert "| **E4M3** | spacing_fading |" in followed.report.replace("\\_", "_")
    cell = json.loads((followed.project.folder / "data/grid/E4M3-spacing_fading-0-1.json").read_text())
    assert cell["arm"]["schedule"] == "cosine" and cell["arm"]["stiffness"] == "ulp"


def test_a_corpus_of_ones_own_is_what_was_trained_on(followed) -> None:
    assert json.loads((followed.project.folder / "data/tokens/meta.json").read_text())["corpus"] == "own"
    assert "Corpus `own`" in followed.report.split("## What it was")[1]
