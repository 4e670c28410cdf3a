"""Cells that cannot train are refused with one sentence before anything trains: the cell, and the sentence.

Cells that start from weights have theirs in `test_start.py`, those with adapters in `test_lora.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from altgrad.config import Cell, Params, Resolver, UserError, load_params
from altgrad.formats import get_format
from altgrad.model import LayerRecipe, TensorRecipe
from altgrad.optim.checks import check_cells
from altgrad.training.run import train_cell
from tests.training.conftest import VOCABULARY, arm_cell, make_cell, with_weight
from tests.training.test_ranks import cell_of as shared_cell
from tests.training.test_switches import STIFF, changing
from tests.training.test_torchao_cells import ao_cell

BLOCK = {"format": "E4M3", "granularity": "block", "scale": "E8M0", "block": 32}


def shipped(entry: str, arm: str = "adamw") -> Cell:
    """Return a tiny cell of a recipe of the shipped params.yaml."""
    params = load_params().model_dump()
    grid = params["grid"] | {"formats": ["bf16", entry], "optimizers": [arm], "seeds": [0]}
    resolved = list(Resolver(Params.model_validate(params | {"grid": grid})).cells())[1]
    fields = {name: getattr(resolved, name) for name in ("key", "rules", "arm", "formats")}
    return make_cell("E4M3", steps=4).model_copy(update=fields | {"format": entry})


def changed(cell: Cell, section: str, **values: object) -> Cell:
    content = json.loads(cell.to_json())
    return Cell.model_validate(content | {section: content[section] | values})


def with_rules(cell: Cell, *rules: dict[str, object]) -> Cell:
    return Cell.model_validate(json.loads(cell.to_json()) | {"rules": rules})


REFUSED: dict[str, tuple[Callable[[], Cell], str]] = {
    "no weight to act on": (
        lambda: arm_cell("rung", "bf16"),
        "^params.yaml: optimizers.adamw: .*has no quantized weight for this arm to act on",
    ),
    "weights on a grid by row": (
        lambda: with_weight(arm_cell("adamw_sr_weights"), granularity="row"),
        "granularity: tensor and scaling: dynamic",
    ),
    "weights on a grid, delayed": (
        lambda: with_weight(arm_cell("adamw_sr_weights"), scaling="delayed"),
        "granularity: tensor and scaling: dynamic",
    ),
    "a two-level scale of 16 bits": (
        lambda: shipped("uniform_two_level.FP16"),
        "^params.yaml: recipe of cell uniform_two_level.FP16-adamw-0-1: weight: no op",
    ),
    "rungs in NVFP4": (lambda: shipped("NVFP4", "rung"), "hold one scale that their optimizer sets"),
    "virtual and static": (
        lambda: with_weight(arm_cell("virtual.adamw"), scaling="static"),
        "^params.yaml: recipe of cell virtual.E4M3-adamw-0-1: weight: virtual needs",
    ),
    "virtual by row": (
        lambda: with_weight(arm_cell("rung"), virtual=True, granularity="row"),
        "hold one scale that their optimizer sets; use granularity: tensor",
    ),
    "virtual in 16 bits": (
        lambda: arm_cell("virtual.rung", "E5M10"),
        "no quantization grid 256 times finer.* takes 24 bits.*; take a format of at most 8 bits",
    ),
    "torchao's head": (
        lambda: ao_cell(layers="*"),
        f"layer head is {VOCABULARY} x 16, and torchao's recipes need both to be divisible by 16",
    ),
    "a pattern without a layer": (lambda: ao_cell(layers="block.*"), "matches no layer"),
    "torchao's batch": (
        lambda: changed(ao_cell(batch=3), "model", context=12),
        "train.batch 3 times context 12 is 36 tokens",
    ),
    "a change to no weights": (
        lambda: changing({"after": 0.5, "recipe": "bf16", "rules": []}, arm=STIFF),
        "under bf16 other weights",
    ),
    "a change to a misspelt layer": (
        lambda: changing({"after": 0.5, "rules": [{"layers": "haed", "weight": "E4M3"}]}),
        "pattern 'haed' matches",
    ),
    "a change on two devices": (lambda: changing({"after": 0.5}, batch=4, devices=2), "is for one process alone"),
    "three devices": (lambda: shared_cell(3), "must divide train.batch 4"),
    "dropout on two devices": (lambda: changed(shared_cell(2), "model", dropout=0.1), "set model.dropout to 0"),
    "torchao on two devices": (
        lambda: with_rules(shared_cell(2), {"layers": "blocks.*", "torchao": "rowwise"}),
        "remove torchao",
    ),
    "blocks on four devices": (
        lambda: with_rules(shared_cell(4), {"layers": "*", "weight": "E4M3", "input": BLOCK}),
        "leaves each process 16 tokens, which are no whole blocks of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_cell_that_cannot_train_is_one_sentence_before_training(name):
    make, sentence = REFUSED[name]
    good = [make_cell("E4M3", seed=seed) for seed in (1, 2)]
    with pytest.raises(UserError, match=sentence) as raised:
        check_cells([*good, make()], VOCABULARY, "E4M3" if "devices" in name else "bf16")
    assert "\n" not in str(raised.value)


def test_what_can_train_is_not_refused(tokens, tmp_path, products):
    cells = [with_weight(arm_cell("spacing_unmatched"), virtual=True, granularity="row"),
             arm_cell("virtual.spacing_unmatched", "E5M10"), shipped("uniform_two_level.E4M3", "spacing_scaled"),
             shipped("NVFP4")]  # fmt: skip
    check_cells(cells, VOCABULARY, "bf16")
    for cell in cells[2:]:
        train_cell(cell, tokens, tmp_path / cell.key, tmp_path)
        found = json.loads((tmp_path / cell.key / "metrics.json").read_text())
        assert found["outcome"] == "completed" and found["quantized_parameters"] > 0


def test_a_geometry_aware_arm_without_quantized_weights_is_allowed_for_the_baseline_alone():
    cell = arm_cell("spacing_unmatched", "bf16")
    check_cells([cell], VOCABULARY, "bf16")
    with pytest.raises(UserError, match="no quantized weight .* or set grid.baseline, which is E4M3, to bf16$"):
        check_cells([cell], VOCABULARY, "E4M3")


VIRTUAL = {"weight": {"virtual": True}}


@pytest.mark.parametrize(("tensors", "words"), [
    ({"input": {"virtual": True}}, "virtual is for the weight, .*; remove it from input"),
    (VIRTUAL | {"grad": {}}, "a layer whose weight is virtual quantizes nothing; remove grad"),
    (VIRTUAL | {"save": "codes"}, "remove save"),
    (VIRTUAL | {"torchao": "rowwise"}, "remove weight or torchao"),
])  # fmt: skip
def test_settings_that_mean_nothing_beside_a_virtual_weight_are_refused(tensors, words):
    with pytest.raises(ValueError, match=words):
        LayerRecipe(**{
            field: TensorRecipe(format=get_format("E4M3"), **value) if isinstance(value, dict) else value
            for field, value in tensors.items()
        })  # fmt: skip
