"""Recipes as Python writes them. Oracle: the same rules, written with every name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from altgrad.config.recipe import LayerRecipe, Recipe, Rule, TensorRecipe

RULES = (Rule(layers="*", weight="E4M3", grad="E5M2"), Rule(layers="head", weight=TensorRecipe(format="E3M4")))


@pytest.mark.parametrize(
    "written",
    [
        lambda: Recipe(rules=list(RULES)),
        lambda: Recipe(rules=(rule for rule in RULES)),
        lambda: Recipe(rules=[{"layers": "*", "weight": "E4M3", "grad": "E5M2"}, {"layers": "head", "weight": "E3M4"}]),
        lambda: Recipe(rules=[LayerRecipe(weight="E4M3", grad="E5M2").on("*"), RULES[1]]),
    ],
)
def test_a_list_of_rules_is_the_recipe_of_these_rules(written: Callable[[], Recipe]) -> None:
    assert written() == Recipe(rules=RULES)
    assert list(written().match(["a", "head"])) == ["a", "head"]


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ("E4M3", "Recipe: rules: expected a list of rules, [Rule(layers='*', weight='E4M3')], not 'E4M3'"),
        (RULES[0], "Recipe: rules: expected a list of rules, [Rule(layers='*', weight='E4M3')], not a Rule"),
        ({"layers": "*"}, "Recipe: rules: expected a list of rules, [Rule(layers='*', weight='E4M3')], not a dict"),
        (8, "Recipe: rules: expected a list of rules, [Rule(layers='*', weight='E4M3')], not 8"),
        ([RULES[0], "E4M3"], "Recipe: rules[1]: expected a rule, such as Rule(layers='*', weight='E4M3'), not 'E4M3'"),
        ([None], "Recipe: rules[0]: expected a rule, such as Rule(layers='*', weight='E4M3'), not None"),
        (
            [RULES[0], LayerRecipe(weight="E4M3")],
            "Recipe: rules[1]: a LayerRecipe names no layers; add .on('*'), or the pattern of those that it is for",
        ),
        ([*RULES, {"layer": "*"}], "Recipe: rules[2]: unknown setting 'layer'; did you mean layers?"),
        ([{"weight": "E4M3"}], "Recipe: rules[0].layers: is missing; add it"),
        ([{"layers": "*", "weight": "E4M"}], "Recipe: rules[0].weight.format: unknown format 'E4M'; did you mean E4M3"),
    ],
)
def test_what_is_no_list_of_rules_is_one_sentence_that_names_the_rule(rules: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        Recipe(rules=rules)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


def test_settings_are_given_by_name_alone() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        Rule("*", weight="E4M3")
