"""Block formats by name are those of their specifications. Oracles: gfloat's; the text of NVFP4's paper."""

from __future__ import annotations

from pathlib import Path

import gfloat.formats as theirs
import pytest

from altgrad.common.files import read_yaml, write_json
from altgrad.config import Params, Resolver, UserError, load_params
from altgrad.config.params import validated
from altgrad.config.recipe import Recipe, published_recipes
from altgrad.config.tensor_recipe import BLOCK_FORMATS, TensorRecipe
from altgrad.model.from_cell import recipe_of

PARAMS = Path(__file__).parents[2] / "params.yaml"
RECIPES = {
    *("MXFP8", "MXFP8_E5M2", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP4", "NVFP4", "NVFP4_4_6", "NVFP4_LAST_BF16"),
    *("QUARTET_II", "FP8_TENSORWISE", "FP8_ROWWISE", "FP8_BLOCKWISE"),
}


PARTS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")


@pytest.mark.parametrize(
    ("name", "info"),
    [
        ("MXFP8", theirs.format_info_mxfp8_e4m3), ("MXFP8_E5M2", theirs.format_info_mxfp8_e5m2),
        ("MXFP6_E2M3", theirs.format_info_mxfp6_e2m3), ("MXFP6_E3M2", theirs.format_info_mxfp6_e3m2),
        ("MXFP4", theirs.format_info_mxfp4_e2m1),
    ],
)  # fmt: skip
def test_mx_formats_are_gfloats(name, info):
    found = TensorRecipe(**BLOCK_FORMATS[name])
    element = found.format
    assert (found.granularity, found.block, found.scale) == ("block", info.k, "E8M0")
    assert (element.exponent_bits, element.mantissa_bits) == (info.etype.expBits, info.etype.precision - 1)
    assert (element.max, element.min_subnormal) == (info.etype.max, info.etype.smallest_subnormal)
    assert info.stype.name.endswith("e8m0")


def test_nvfp4_has_sixteen_of_e2m1_under_a_scale_in_e4m3():
    found = TensorRecipe(**BLOCK_FORMATS["NVFP4"])
    assert (found.format.name, found.block, found.scale, found.format.max) == ("E2M1", 16, "E4M3", 6)
    assert found.block_scale is not None and found.block_scale.max == 448


def test_a_name_stands_for_all_of_it_in_any_recipe():
    by_name = Recipe(rules=[{"layers": "*", "weight": "MXFP4", "grad": "NVFP4"}]).rules[0]
    assert by_name.weight == TensorRecipe(**BLOCK_FORMATS["MXFP4"])
    assert by_name.grad == TensorRecipe(**BLOCK_FORMATS["NVFP4"]) and by_name.input is None


def test_the_named_recipes_are_entries_of_a_grid(tmp_path):
    params = read_yaml(PARAMS)
    write_json(tmp_path / "params.yaml", params | {"grid": params["grid"] | {"formats": sorted(RECIPES)}})
    params = load_params(tmp_path / "params.yaml")
    assert set(params.recipes) >= RECIPES
    assert {cell.format for cell in Resolver(params.model_copy(update={
        "grid": params.grid.model_copy(update={"baseline": "MXFP8"})})).cells()} == RECIPES  # fmt: skip


def names_of_layers(blocks, parts, count, head):
    return [*(f"{blocks}.{i}.{part}" for i in range(count) for part in parts), head]


@pytest.mark.parametrize("name", published_recipes())
def test_a_name_is_one_recipe_in_python_and_in_the_grid(name):
    """The oracle is the cell that the grid resolves. Other models' heads and blocks are treated as the bench's are."""
    params = load_params(PARAMS)
    grid = params.grid.model_copy(update={"formats": [name], "optimizers": ["adamw"], "seeds": [0], "baseline": name})
    (cell,) = Resolver(params.model_copy(update={"grid": grid})).cells()
    theirs = {
        ("blocks", PARTS, "head"): recipe_of(cell),
        ("transformer.h", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), "lm_head"): Recipe.named(name),
        ("module.encoder.layers", PARTS, "module.head"): Recipe.named(name),
    }
    for count in (1, 2, 3, 12):
        bench = names_of_layers("blocks", PARTS, count, "head")
        expected = recipe_of(cell).match(bench)
        assert Recipe.named(name).match(bench) == expected
        for (blocks, parts, head), recipe in theirs.items():
            other = names_of_layers(blocks, parts, count, head)
            found = recipe.match(other)
            assert [found.get(n) for n in other] == [expected.get(n) for n in bench]


def test_a_model_without_blocks_and_head_is_quantized_whole():
    assert list(Recipe.named("NVFP4").match(["0", "2"])) == ["0", "2"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe.named("NVFP5"), "no published recipe is called 'NVFP5'; did you mean NVFP4 or"),
        (lambda: Recipe.named("mxfp8"), "did you mean MXFP8"),
        (lambda: Recipe.uniform("NVFP4"), "format of gradients; take Recipe.named('NVFP4'), the recipe as published"),
        (lambda: Recipe.uniform("MXFP8_E5M2", rounding="stochastic"), "take Recipe.named('MXFP8_E5M2')"),
        (lambda: Recipe.uniform("NVFP4_16x16"), "take Recipe.named('NVFP4')"),
    ],
)
def test_what_no_published_recipe_is_meant_by_is_one_sentence(make, words):
    with pytest.raises(ValueError) as raised:
        make()
    assert words in str(raised.value) and "\n" not in str(raised.value)


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


def test_a_uniform_recipe_takes_a_block_format_by_its_name():
    tensors = {"weight": "MXFP8", "input": "MXFP8", "grad": "MXFP8_E5M2"}
    written = Recipe(rules=[{"layers": "*"} | tensors])
    assert Recipe.uniform("MXFP8", grad="MXFP8_E5M2").match(["layer"]) == written.match(["layer"])
