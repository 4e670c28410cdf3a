"""What a recipe or a model cannot have is refused in one sentence that names the setting.

Oracle: a table of settings and sentences. The model is as before after a refusal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from altgrad.model import GPTConfig, LayerRecipe, Recipe, TensorRecipe, quantize_model, requantize_model

E4M3, E2M1 = (TensorRecipe(format=name) for name in ("E4M3", "E2M1"))
MXFP8 = E4M3.but(granularity="block", scale="E8M0")
ROWS_OF_128, TILES_OF_128 = (E4M3.but(granularity=name, block=128) for name in ("block", "tile"))
NVFP4 = E2M1.but(granularity="block", block=16, scale="E4M3")
TWO_LEVEL = {"format": "E2M5", "granularity": "block", "scale": "E4M3"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"granularity": "row", "scaling": "delayed"}, "granularity row needs scaling dynamic"),
        ({"granularity": "block", "scaling": "static"}, "granularity block needs scaling dynamic"),
        ({"granularity": "column"}, "granularity"), ({"block": 0}, "block"), ({"scaling": "sometimes"}, "scaling"),
        ({"scale": "fp8"}, "scale"), ({"reduce": "mean"}, "reduce"), ({"history": 0}, "history"),
        ({"rounding": "stochastic", "virtual": True}, "virtual needs rounding nearest"),
        (TWO_LEVEL | {"granularity": "row"}, "scale E4M3 needs granularity block or tile; for granularity row take"),
        (TWO_LEVEL | {"scale_rounding": "floor"}, "it needs scale E8M0"),
        (TWO_LEVEL | {"scale": "E0M8"}, "no operand holds E2M5 times a scale in E0M8 exactly: .* 12 significant bits"),
        (TWO_LEVEL | {"scale": "BF16"}, "scales in BF16 span more than float32 can round"),
        (TWO_LEVEL | {"scale": "E4M"}, "'E4M' is no format of a scale"),
        (TWO_LEVEL | {"scaling": "delayed"}, "granularity block needs scaling dynamic"),
    ],
)  # fmt: skip
def test_of_a_tensor(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TensorRecipe(**{"format": "E4M3"} | options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient": "identity"}, "gradient"), ({"accumulate": "fp8"}, "accumulate"),
        ({"save": "codes", "input": E4M3.but(granularity="row")}, "save codes needs granularity tensor, not row"),
        ({"save": "codes", "weight": TensorRecipe(format="E5M10")}, "at most 8 bits, and FP16 has more"),
        ({"torchao": "columnwise"}, "torchao: input should be 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'"),
        ({"torchao": "rowwise"}, "torchao: rowwise decides weight itself"),
        ({"torchao": "rowwise", "accumulate": "float32", "weight": None, "input": None, "grad": None},
         "torchao: rowwise has no setting accumulate"),
    ],
)  # fmt: skip
def test_of_a_layer(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LayerRecipe(**{"weight": E4M3, "input": E4M3, "grad": TensorRecipe(format="E5M2")} | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input": None}, "input is not quantized"),
        ({"weight": TensorRecipe(format="E3M4")}, "weight is E3M4"),
        ({"weight": TensorRecipe(format="E5M2")}, "no product of E5M2 and E5M2, which grad and weight both are"),
        ({"grad": TensorRecipe(format="E5M2", granularity="row")}, "one granularity"),
        ({"save": "codes"}, "leave out save codes"),
        ({"weight": MXFP8, "input": MXFP8}, "one granularity"),
        ({"weight": TILES_OF_128, "input": TILES_OF_128, "grad": ROWS_OF_128}, "one granularity"),
        ({"weight": MXFP8.but(scale="float32"), "input": MXFP8, "grad": MXFP8}, "one granularity"),
        ({"weight": MXFP8, "input": MXFP8, "grad": MXFP8.but(format="E5M2")}, "MXFP8 in E4M3 alone; grad is E5M2"),
        ({"weight": NVFP4, "input": NVFP4, "grad": MXFP8}, "one granularity"),
        ({"weight": NVFP4, "input": NVFP4.but(granularity="tile"), "grad": NVFP4}, "one granularity"),
        ({"weight": NVFP4, "input": NVFP4, "grad": NVFP4.but(format="E2M3")}, "E4M3 or E5M2, or all in NVFP4; grad is"),
        ({"weight": NVFP4, "input": NVFP4, "grad": NVFP4.but(format="E4M3")}, "NVFP4 in E2M1 alone; grad is E4M3"),
        (dict.fromkeys(("weight", "input", "grad"), MXFP8.but(format="E2M1")), "MXFP8 in E4M3 alone; weight is E2M1"),
        ({"weight": NVFP4, "input": NVFP4, "grad": NVFP4.but(rounding="MS-EDEN")}, "backend native has no MS-EDEN"),
    ],
)
def test_of_a_layer_by_hardware(changes: dict[str, Any], words: str) -> None:
    recipe = Recipe.uniform("E4M3").rules[0].layer.but(**changes)
    with pytest.raises(ValueError, match=words):
        recipe.but(backend="native")


def rule(layers: str, **options: Any) -> Recipe:
    return Recipe(rules=(LayerRecipe(**options).on(layers),))


def linear(rows: int = 32, columns: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(columns, rows))


def codes(**settings: Any) -> tuple[Callable[[], nn.Module], Recipe, dict[str, bool]]:
    return linear, Recipe.uniform("E4M3", **settings), {"gather_codes": True}


GATHER = "cannot gather the weight of layer 0: .*take {}, or leave gather_codes out"
SIZES = "layer 0 is {} x {}, .* divisible by 16; leave the layer out"
MODELS: dict[str, tuple[tuple[Any, ...], str]] = {
    "no recipe": ((linear, "E4M3", {}), r"^expected a Recipe, such as Recipe.uniform\('E4M3'\), got 'E4M3'$"),
    "no layer": ((linear, rule("1", weight="E4M3"), {}), "pattern '1' matches no layer; one that the model has is 0"),
    "the model itself": ((lambda: nn.Linear(4, 4), Recipe.uniform("E4M3"), {}), "put it in a module to quantize it"),
    "torchao, rows": ((lambda: linear(40), rule("*", torchao="tensorwise"), {}), SIZES.format(40, 32)),
    "torchao, columns": ((lambda: linear(32, 97), rule("*", torchao="tensorwise"), {}), SIZES.format(32, 97)),
    "torchao, Conv1D": ((lambda: nn.Sequential(Conv1D(16, 16)), rule("0", torchao="tensorwise"), {}),
                        "layer 0 is a Conv1D, which torchao does not take"),
    "sync_amax": ((linear, Recipe.uniform("E4M3"), {"sync_amax": True}), "init_process_group before the model"),
    **{f"codes, {what}": (codes(**settings), GATHER.format(instead)) for what, settings, instead in (
        ("row", {"granularity": "row"}, "granularity tensor"),
        ("block", {"granularity": "block", "scale": "E8M0"}, "granularity tensor"),
        ("delayed", {"scaling": "delayed"}, "scaling dynamic"), ("static", {"scaling": "static"}, "scaling dynamic"),
        ("stochastic", {"rounding": "stochastic"}, "rounding nearest"),
        ("clipped", {"gradient": "clipped"}, "gradient straight-through"),
    )},
    "codes, torchao": ((linear, rule("0", torchao="tensorwise"), {"gather_codes": True}), "torchao gathers the"),
    "codes, FP16": ((linear, rule("0", weight="E5M10"), {"gather_codes": True}), "has more than 8 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_of_a_model(name: str) -> None:
    (make, recipe, options), words = MODELS[name]
    model = make()
    before = list(model.modules())
    with pytest.raises((ValueError, TypeError), match=words):
        quantize_model(model, recipe, **options)
    assert list(model.modules()) == before and all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("first", [Recipe.uniform("E4M3"), rule("0", torchao="tensorwise")], ids=["", "torchao"])
def test_of_a_model_that_is_quantized(first: Recipe) -> None:
    model = quantize_model(linear(), first)
    with pytest.raises(ValueError, match="already quantized"):
        quantize_model(model, Recipe.uniform("E5M2"))
    before = copy.deepcopy(model[0].recipe)
    with pytest.raises(ValueError, match="pattern 'haed' matches no layer"):
        requantize_model(model, rule("haed", weight="E4M3"))
    assert model[0].recipe == before
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        model.load_state_dict({"0.bias": torch.zeros(32)})
    with pytest.raises(RuntimeError, match="Unexpected key.*0.other"):
        model.load_state_dict(linear().state_dict() | {"0.other": torch.zeros(1)})


def test_of_the_transformer() -> None:
    with pytest.raises(ValueError, match="divisible"):
        GPTConfig(vocab_size=8, layers=1, width=10, heads=3, context=4)
    with pytest.raises(ValueError, match="gelu must be one of exact, tanh, not 'quick'"):
        GPTConfig(vocab_size=8, layers=1, width=16, heads=2, context=8, gelu="quick")


TABLES = [("POSIT8", "scale_to 1 of rms is not the amax"), ("dynamic8", "no code for NaN")]


@pytest.mark.parametrize(("fmt", "why"), TABLES)
def test_a_table_is_gathered_only_where_its_codes_suffice(fmt, why):
    with pytest.raises(ValueError, match=why):
        quantize_model(nn.Sequential(nn.Linear(32, 32)), Recipe.uniform(fmt), gather_codes=True)
