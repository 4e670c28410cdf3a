"""Recipes as Python writes them, and block formats by the names of their specifications.

Oracles: the same rules, written with every name; gfloat's formats; the text of NVFP4's paper; the cell that a grid
resolves.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gfloat.formats as theirs
import pytest

from altgrad.config import Params, Resolver, UserError, load_params
from altgrad.config.params import validated
from altgrad.config.recipe import LayerRecipe, Recipe, Rule, TensorRecipe, published_recipes
from altgrad.config.tensor_recipe import BLOCK_FORMATS
from altgrad.model.from_cell import recipe_of

PARAMS = Path(__file__).parents[2] / "params.yaml"
RULES = (Rule(layers="*", weight="E4M3", grad="E5M2"), Rule(layers="head", weight=TensorRecipe(format="E3M4")))
PARTS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
LIST = "Recipe: rules: expected a list of rules, [Rule(layers='*', weight='E4M3')], not "
NO_LIST = [("E4M3", "'E4M3'"), (RULES[0], "a Rule"), ({"layers": "*"}, "a dict"), (8, "8")]


def names_of_layers(blocks: str, parts: tuple[str, ...], count: int, head: str) -> list[str]:
    return [*(f"{blocks}.{i}.{part}" for i in range(count) for part in parts), head]


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
    ("make", "sentence"),
    [
        *((lambda rules=rules: Recipe(rules=rules), f"{LIST}{shown}") for rules, shown in NO_LIST),
        *((lambda rules=rules: Recipe(rules=rules), f"Recipe: rules{words}") for rules, words in (
            ([RULES[0], "E4M3"], "[1]: expected a rule, such as Rule(layers='*', weight='E4M3'), not 'E4M3'"),
            ([None], "[0]: expected a rule, such as Rule(layers='*', weight='E4M3'), not None"),
            ([RULES[0], LayerRecipe(weight="E4M3")], "[1]: a LayerRecipe names no layers; add .on('*'), or the"),
            ([*RULES, {"layer": "*"}], "[2]: unknown setting 'layer'; did you mean layers?"),
            ([{"weight": "E4M3"}], "[0].layers: is missing; add it"),
            ([{"layers": "*", "weight": "E4M"}], "[0].weight.format: unknown format 'E4M'; did you mean E4M3"),
        )),
        (lambda: Recipe.named("NVFP5"), "no published recipe is called 'NVFP5'; did you mean NVFP4 or"),
        (lambda: Recipe.named("mxfp8"), "did you mean MXFP8"),
        (lambda: Recipe.uniform("NVFP4"), "format of gradients; take Recipe.named('NVFP4'), the recipe as published"),
        (lambda: Recipe.uniform("MXFP8_E5M2", rounding="stochastic"), "take Recipe.named('MXFP8_E5M2')"),
        (lambda: Recipe.uniform("NVFP4_16x16"), "take Recipe.named('NVFP4')"),
    ],
)  # fmt: skip
def test_what_is_no_recipe_is_one_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_settings_are_given_by_name_alone() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        Rule("*", weight="E4M3")


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("MXFP8", theirs.format_info_mxfp8_e4m3), ("MXFP8_E5M2", theirs.format_info_mxfp8_e5m2),
        ("MXFP6_E2M3", theirs.format_info_mxfp6_e2m3), ("MXFP6_E3M2", theirs.format_info_mxfp6_e3m2),
        ("MXFP4", theirs.format_info_mxfp4_e2m1),
    ],
)  # fmt: skip
def test_mx_formats_are_gfloats_and_a_name_stands_for_all_of_it(name, info):
    found = TensorRecipe(**BLOCK_FORMATS[name])
    element = found.format
    assert (found.granularity, found.block, found.scale) == ("block", info.k, "E8M0")
    assert (element.exponent_bits, element.mantissa_bits) == (info.etype.expBits, info.etype.precision - 1)
    assert (element.max, element.min_subnormal) == (info.etype.max, info.etype.smallest_subnormal)
    assert info.stype.name.endswith("e8m0")
    assert Recipe(rules=[{"layers": "*", "weight": name}]).rules[0].weight == found
    written = Recipe(rules=[{"layers": "*", "weight": name, "input": name, "grad": "MXFP4"}])
    assert Recipe.uniform(name, grad="MXFP4").match(["layer"]) == written.match(["layer"])


def test_nvfp4_has_sixteen_of_e2m1_under_a_scale_in_e4m3():
    found = TensorRecipe(**BLOCK_FORMATS["NVFP4"])
    assert (found.format.name, found.block, found.scale, found.format.max) == ("E2M1", 16, "E4M3", 6)
    assert found.block_scale is not None and found.block_scale.max == 448


@pytest.mark.parametrize("name", published_recipes())
def test_a_name_is_one_recipe_in_python_and_in_the_grid(name):
    """Other models' heads and blocks are treated as the bench's are."""
    params = load_params(PARAMS)
    grid = params.grid.model_copy(update={"formats": [name], "optimizers": ["adamw"], "seeds": [0]})
    (cell,) = Resolver(params.model_copy(update={"grid": grid})).cells()
    others = (
        ("transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), "lm_head"),
        ("module.encoder.layers", PARTS, "module.head"),
    )
    for count in (1, 2, 3, 12):
        bench = names_of_layers("blocks", PARTS, count, "head")
        expected = recipe_of(cell).match(bench)
        assert Recipe.named(name).match(bench) == expected
        for blocks, parts, head in others:
            other = names_of_layers(blocks, parts, count, head)
            found = Recipe.named(name).match(other)
            assert [found.get(n) for n in other] == [expected.get(n) for n in bench]


def test_a_model_without_blocks_and_head_is_quantized_whole():
    assert list(Recipe.named("NVFP4").match(["0", "2"])) == ["0", "2"]


def test_params_may_say_a_published_recipe_again_and_not_otherwise():
    values = load_params(PARAMS).model_dump()
    assert validated(Params, values, "params.yaml").recipes["MXFP4"] == load_params(PARAMS).recipes["MXFP4"]
    values["recipes"] |= {"MXFP4": values["recipes"]["MXFP8"]}
    with pytest.raises(UserError, match="params.yaml: recipes: the published recipe MXFP4 has other rules; give"):
        validated(Params, values, "params.yaml")


def test_a_rule_may_be_for_the_last_share_of_the_layers_that_match():
    names = names_of_layers("blocks", PARTS, 4, "head")
    recipe = Recipe(rules=[
        {"layers": "*", "weight": "E4M3"}, {"layers": "blocks.*", "last": 0.15}, {"layers": "head", "weight": "E5M2"},
    ])  # fmt: skip
    matched = recipe.match(names)
    assert list(matched) == [*names[:13], "head"]  # 15 % of 16 layers are 2.4
    assert matched["head"].weight.format.name == "E5M2"
