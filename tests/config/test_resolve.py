"""Laws of the grid: which cells there are, what decides each one's file, and what does not.

The oracle for keys is DVC's own naming of matrix stages (values joined by "-").
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from altgrad.config import Cell, Params, Resolver, UserError, cell_key, load_params, write_grid
from altgrad.config.cell import position_in_grid

SHIPPED = load_params(Path(__file__).parents[2] / "params.yaml")
GRID = {"formats": ["bf16", "E4M3", "E5M2", "E3M4", "E1M6", "E7M0"], "optimizers": ["adamw"], "seeds": [0, 1]}
SHIPPED = SHIPPED.model_copy(update={"grid": SHIPPED.grid.model_copy(update=GRID)})


def changed(**sections) -> Params:
    """Return the shipped params with values laid over sections, such as ``grid={"seeds": [3]}``."""
    values = SHIPPED.model_dump()
    for section, change in sections.items():
        values[section] = {**values[section], **change} if isinstance(change, dict) else change
    return Params.model_validate(values)


def cells(params: Params) -> dict[str, Cell]:
    return {cell.key: cell for cell in Resolver(params).cells()}


def test_the_grid_is_the_product_of_its_lists():
    params = changed(grid={"formats": ["bf16", "E4M3"], "seeds": [0, 1, 2], "lr_scales": [0.5, 1, 1e-5]})
    found = cells(params)
    assert len(found) == 2 * 1 * 3 * 3
    assert "E4M3-adamw-2-0.5" in found and "bf16-adamw-0-1" in found and "E4M3-adamw-0-1e-05" in found


def test_keys_are_spelt_as_dvc_spells_them():
    assert cell_key("E4M3", "adamw", 0, 1) == "E4M3-adamw-0-1"
    assert cell_key("E4M3", "adamw", 0, 1.0) == "E4M3-adamw-0-1.0"


def test_a_cell_survives_its_file(tmp_path):
    resolver = Resolver(SHIPPED)
    write_grid(list(resolver.cells()), resolver.selected(), tmp_path)
    for key, cell in cells(SHIPPED).items():
        read = Cell.read(tmp_path / f"{key}.json")
        assert read == cell and read.sha256() == cell.sha256()
    assert json.loads((tmp_path / "index.json").read_text())["cells"] == list(cells(SHIPPED))
    assert position_in_grid(tmp_path, "E4M3-adamw-0-1") == "[3/12]"


@pytest.mark.parametrize(
    "change",
    [
        {"models": {"huge": SHIPPED.models["nano"]}},
        {"recipes": {"new": SHIPPED.recipes["uniform"]}},
        {"optimizers": {"slow": SHIPPED.optimizers["adamw"]}},
        {"formats": {"mine": {"exponent_bits": 4, "mantissa_bits": 3}}},
        {"corpora": {"more": SHIPPED.corpora["licences"]}},
    ],
)
def test_a_preset_that_is_not_picked_changes_nothing(change):
    before, after = Resolver(SHIPPED), Resolver(changed(**change))
    assert list(before.cells()) == list(after.cells())
    assert before.selected() == after.selected()


def test_adding_a_format_leaves_the_other_cells_alone():
    before = cells(SHIPPED)
    after = cells(changed(grid={"formats": [*SHIPPED.grid.formats, "E0M7"]}))
    assert {k: after[k] for k in before} == before
    assert len(after) == len(before) + 2


def test_the_baseline_quantizes_nothing_and_a_format_fills_the_recipe():
    found = cells(SHIPPED)
    assert found["bf16-adamw-0-1"].rules == [] and found["bf16-adamw-0-1"].formats == {}
    cell = found["E3M4-adamw-1-1"]
    assert cell.rules[0].weight.format == cell.rules[0].input.format == "E3M4"
    assert cell.rules[0].grad.format == "E5M2" and cell.rules[1].input is None
    assert set(cell.formats) == {"E3M4", "E5M2"}


TORCHAO = {
    "ao_tensorwise": ("E4M3", "E5M2", "tensor", "float32"),
    "ao_rowwise": ("E4M3", "E4M3", "row", "E8M0"),
    "ao_rowwise_gw_hp": ("E4M3", "E4M3", "row", "E8M0"),
}


@pytest.mark.parametrize("entry", TORCHAO)
def test_the_cell_of_a_torchao_recipe_says_what_it_quantizes(entry, tmp_path):
    resolver = Resolver(changed(grid={"formats": ["bf16", entry], "seeds": [0]}))
    write_grid(list(resolver.cells()), resolver.selected(), tmp_path)
    cell = Cell.read(tmp_path / f"{entry}-adamw-0-1.json")
    assert cell == list(resolver.cells())[1]
    (rule,) = cell.rules
    weight, grad, granularity, scale = TORCHAO[entry]
    assert (rule.layers, rule.weight.format, rule.input.format, rule.grad.format) == ("blocks.*", weight, weight, grad)
    assert all((spec.granularity, spec.scale) == (granularity, scale) for spec in (rule.weight, rule.input, rule.grad))
    assert set(cell.formats) == {weight, grad}


def test_a_rule_written_before_there_was_torchao_means_the_same():
    cell = cells(SHIPPED)["E4M3-adamw-0-1"]
    values = cell.model_dump(mode="json")
    for rule in values["rules"]:
        assert rule.pop("torchao") is None
    assert Cell.model_validate(values) == cell


def test_a_torchao_recipe_may_stand_in_overrides():
    params = changed(overrides={"ao_rowwise": {"train": {"clip": 0.5}}}, grid={"formats": ["bf16", "ao_rowwise"]})
    assert cells(params)["ao_rowwise-adamw-0-1"].train.clip == 0.5


@pytest.mark.parametrize("selector", ["E5M2-adamw-7-1", "E5M2-adamw-0-2", "E5M2-adamw-0-2.0", "E5M2-adamw-0-1e-05"])
def test_an_override_for_a_cell_outside_the_grid_is_kept_and_named(selector):
    resolver = Resolver(changed(overrides={selector: {"train": {"clip": 0.5}}}))
    assert resolver.idle() == [f"overrides.{selector}"]
    assert cells(SHIPPED) == {cell.key: cell for cell in resolver.cells()}


def test_an_override_for_a_format_outside_the_grid_is_kept():
    params = changed(grid={"formats": ["E3M4"]}, overrides={"E5M2": {"train": {"clip": 0.5}}})
    assert set(cells(params)) == {"E3M4-adamw-0-1", "E3M4-adamw-1-1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"overrides": {"E5M3x": {"train": {"clip": 1}}}}, "overrides: 'E5M3x'"),
        ({"overrides": {"E5M2-adamw-0": {"train": {"clip": 1}}}}, "did you mean E5M2-adamw-0-1"),
        ({"overrides": {"E5M2": {"trian": {"clip": 1}}}}, "overrides.E5M2: unknown setting 'trian'"),
        ({"overrides": {"E5M2": {"train": {"clap": 1}}}}, "overrides.E5M2.train: unknown setting 'clap'"),
        ({"overrides": {"E5M2": {"train": {"clip": -1}}}}, "overrides.E5M2.train: clip"),
        ({"overrides": {"E5M2": {"recipe": "unifrom"}}}, "did you mean uniform"),
        ({"grid": {"formats": ["E4M3", "E4M3x"]}}, "grid.formats[1]: unknown format 'E4M3x'; did you mean E4M3 or"),
        ({"grid": {"baseline": "b16"}}, "grid.baseline"),
        ({"grid": {"formats": ["uniform"]}}, "uses FORMAT"),
        ({"overrides": {"uniform": {"train": {"clip": 1}}}}, "'uniform' is no format, recipe, arm or cell"),
        ({"overrides": {"E4M3-adamw-0-1.0": {"train": {"clip": 1}}}}, "as E4M3-adamw-0-1"),
        ({"overrides": {"E4M3-adamw-00-1": {"train": {"clip": 1}}}}, "as E4M3-adamw-0-1"),
        ({"overrides": {"E7M0": {"arm": {"lr": -1}}}, "grid": {"formats": ["E4M3"]}}, "overrides.E7M0.arm: lr"),
        ({"overrides": {"adamw": {"arm": {"weight_decay": 0.1}}}}, "overrides.adamw.arm: weight_decay times the"),
        ({"formats": {"E4M3": {"exponent_bits": 3, "mantissa_bits": 4}}}, "formats.E4M3: the name is taken"),
        ({"formats": {"bf16": {"exponent_bits": 3, "mantissa_bits": 4}}}, "formats.bf16: the name is taken"),
        ({"recipes": {"adamw": []}}, "recipes.adamw: the name is taken"),
        ({"grid": {"recipe": "bf16"}}, "does not use FORMAT"),
        ({"grid": {"recipe": "ao_rowwise"}}, "does not use FORMAT"),
        ({"overrides": {"E5M2": {"recipe": "ao_rowwise"}}}, "does not use FORMAT"),
    ],
)
def test_a_mistake_names_its_place(change, words):
    with pytest.raises(UserError) as raised:
        cells(changed(**change))
    assert words in str(raised.value)


def test_a_format_of_ones_own_reaches_its_cells_in_full():
    params = changed(formats={"mine": {"exponent_bits": 4, "mantissa_bits": 3, "bias": 9}}, grid={"formats": ["mine"]})
    assert cells(params)["mine-adamw-0-1"].formats["mine"].bias == 9


def test_the_format_that_an_arm_takes_its_stiffness_from_is_resolved_too():
    found = cells(changed(grid={"formats": ["E3M4"], "optimizers": ["foreign_unmatched"], "seeds": [0]}))
    assert set(found["E3M4-foreign_unmatched-0-1"].formats) == {"E3M4", "E5M2"}
    arms = {"foreign_unmatched": {**SHIPPED.optimizers["foreign_unmatched"].model_dump(), "foreign": "E9M9"}}
    with pytest.raises(UserError, match="optimizers.foreign_unmatched.foreign: unknown format 'E9M9'"):
        cells(changed(grid={"optimizers": ["foreign_unmatched"]}, optimizers=arms))
