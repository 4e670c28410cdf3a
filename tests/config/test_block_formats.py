"""Block formats by name are those of their specifications. Oracles: gfloat's; the text of NVFP4's paper."""

from __future__ import annotations

from pathlib import Path

import gfloat.formats as theirs
import pytest

from altgrad.config import Resolver, load_params
from altgrad.config.recipe import Recipe
from altgrad.config.tensor_recipe import BLOCK_FORMATS, TensorRecipe

PARAMS = Path(__file__).parents[2] / "params.yaml"
RECIPES = {
    *("MXFP8", "MXFP8_E5M2", "MXFP6_E2M3", "MXFP6_E3M2", "MXFP4", "NVFP4", "NVFP4_4_6", "NVFP4_LAST_BF16"),
    *("QUARTET_II", "FP8_TENSORWISE", "FP8_ROWWISE", "FP8_BLOCKWISE"),
}


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
    text = PARAMS.read_text()
    start = text.index("  formats: [")
    (tmp_path / "params.yaml").write_text(f"{text[:start]}  formats: [{', '.join(sorted(RECIPES))}]"
                                          f"{text[text.index(chr(10), start):]}")  # fmt: skip
    params = load_params(tmp_path / "params.yaml")
    assert set(params.recipes) >= RECIPES
    assert {cell.format for cell in Resolver(params.model_copy(update={
        "grid": params.grid.model_copy(update={"baseline": "MXFP8"})})).cells()} == RECIPES  # fmt: skip


def test_a_rule_may_be_for_the_last_share_of_the_layers_that_match():
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    names = [*(f"blocks.{i}.{part}" for i in range(4) for part in parts), "head"]
    recipe = Recipe(rules=[
        {"layers": "*", "weight": "E4M3"}, {"layers": "blocks.*", "last": 0.15}, {"layers": "head", "weight": "E5M2"},
    ])  # fmt: skip
    matched = recipe.match(names)
    assert list(matched) == [*names[:13], "head"]  # 15 % of 16 layers are 2.4
    assert matched["head"].weight.format.name == "E5M2"


def test_a_uniform_recipe_takes_a_block_format_by_its_name():
    tensors = {"weight": "MXFP8", "input": "MXFP8", "grad": "MXFP8_E5M2"}
    assert Recipe.uniform("MXFP8", grad="MXFP8_E5M2").match(["layer"]) == Recipe([{"layers": "*"} | tensors]).match(
        ["layer"]
    )
