"""Laws of the grid: which cells there are, what decides the file of each, and what a name in the grid stands for.

Oracles: DVC's own naming of matrix stages (values joined by "-"); a recipe as ``grid.recipe`` for the same recipe in an
entry such as ``virtual.E3M4``. `test_overrides.py` has the laws of overrides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from altgrad.config import Cell, Params, Resolver, UserError, cell_key, load_params, write_grid
from altgrad.config.cell import position_in_grid

PROJECT = Path(__file__).parents[2]
SHIPPED = load_params(PROJECT / "params.yaml")
GRID = {"formats": ["bf16", "E4M3", "E5M2", "E3M4", "E1M6", "E7M0"], "optimizers": ["adamw"], "seeds": [0, 1]}
SHIPPED = SHIPPED.model_copy(update={"grid": SHIPPED.grid.model_copy(update=GRID)})
TEMPLATES = ["virtual", "uniform", "uniform_delayed", "uniform_row", "uniform_block", "weight_only", "mlp_only"]
OWN = {"mine": {"exponent_bits": 4, "mantissa_bits": 3, "bias": 9}}


def resolver(**sections: Any) -> Resolver:
    """Return the shipped params' resolver with values laid over sections, such as ``grid={"seeds": [3]}``."""
    values = SHIPPED.model_dump()
    for section, change in sections.items():
        values[section] = {**values[section], **change} if isinstance(change, dict) else change
    return Resolver(Params.model_validate(values))


def cells(**sections: Any) -> dict[str, Cell]:
    return {cell.key: cell for cell in resolver(**sections).cells()}


def schedule(**switch: Any) -> dict[str, Any]:
    """Return a change to params.yaml: a recipe called new, which changes after half of the steps unless told."""
    return {"recipes": {"new": {"recipe": "uniform", "schedule": [{"recipe": "bf16", "after": 0.5} | switch]}}}


# --- the grid ------------------------------------------------------------------------------------


def test_the_grid_is_the_product_of_its_lists():
    grid = {"formats": ["bf16", "E4M3"], "seeds": [0, 1, 2], "lr_scales": [0.5, 1, 1e-5]}
    ends = [f"adamw-{seed}-{scale}" for seed in (0, 1, 2) for scale in ("0.5", "1", "1e-05")]
    assert list(cells(grid=grid)) == [f"{fmt}-{end}" for fmt in ("bf16", "E4M3") for end in ends]


def test_dvc_takes_its_keys(tmp_path):
    formats, scales = ["bf16", "virtual.E3M4", "uniform_row.E4M3"], [0.5, 1, 1.0e-5]
    yaml = YAML()
    params = yaml.load(PROJECT / "params.yaml")
    params["grid"] |= {"formats": formats, "optimizers": ["adamw"], "seeds": [0], "lr_scales": scales}
    with open(tmp_path / "params.yaml", "w") as file:
        yaml.dump(params, file)
    (tmp_path / "dvc.yaml").write_text((PROJECT / "dvc.yaml").read_text())
    dvc = [sys.executable, "-m", "dvc"]
    subprocess.run([*dvc, "init", "--quiet", "--no-scm"], cwd=tmp_path, check=True)
    listed = subprocess.run(
        [*dvc, "stage", "list", "--name-only"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    keys = {name.removeprefix("train@") for name in listed.stdout.split() if name.startswith("train@")}
    assert keys == {cell_key(entry, "adamw", 0, scale) for entry in formats for scale in scales}


def test_a_cell_survives_its_file_and_an_own_format_is_in_it_in_full(tmp_path):
    formats = ["bf16", "mine", "ao_rowwise", "emergency.E3M4", "NVFP4"]
    made = resolver(grid={"formats": formats, "optimizers": ["adamw", "foreign_unmatched", "adamw_coat"]}, formats=OWN)
    grid = list(made.cells())
    write_grid(grid, made.selected(), tmp_path)
    for cell in grid:
        read = Cell.read(tmp_path / f"{cell.key}.json")
        assert read == cell and read.sha256() == cell.sha256()
    assert json.loads((tmp_path / "index.json").read_text())["cells"] == [cell.key for cell in grid]
    assert position_in_grid(tmp_path, "mine-adamw-0-1") == "[7/30]"
    written = json.loads((tmp_path / "mine-adamw-0-1.json").read_text())["formats"]
    assert written["mine"] == OWN["mine"] | {"name": "mine", "signed": True, "specials": "finite"}


@pytest.mark.parametrize(
    "change",
    [
        {"models": {"huge": SHIPPED.models["nano"]}},
        {"recipes": {"new": SHIPPED.recipes["uniform"]}},
        {"optimizers": {"slow": SHIPPED.optimizers["adamw"]}},
        {"formats": OWN},
        {"corpora": {"more": SHIPPED.corpora["licences"]}},
    ],
)
def test_a_preset_that_is_not_picked_changes_nothing(change):
    before, after = resolver(), resolver(**change)
    assert list(before.cells()) == list(after.cells())
    assert before.selected() == after.selected()


def test_a_new_format_leaves_the_other_cells_alone():
    before, after = cells(), cells(grid={"formats": [*SHIPPED.grid.formats, "E0M7"]})
    assert {key: after[key] for key in before} == before and len(after) == len(before) + 2


def test_the_baseline_quantizes_nothing_and_a_format_fills_the_recipe():
    found = cells()
    assert found["bf16-adamw-0-1"].rules == [] and found["bf16-adamw-0-1"].formats == {}
    cell = found["E3M4-adamw-1-1"]
    assert cell.rules[0].weight.format == cell.rules[0].input.format == "E3M4"
    assert cell.rules[0].grad.format == "E5M2" and cell.rules[1].input is None
    assert set(cell.formats) == {"E3M4", "E5M2"}


@pytest.mark.parametrize(("entry", "grad", "granularity", "scale"), [
    ("ao_tensorwise", "E5M2", "tensor", "float32"), ("ao_rowwise", "E4M3", "row", "E8M0"),
    ("ao_rowwise_gw_hp", "E4M3", "row", "E8M0"),
])  # fmt: skip
def test_the_cell_of_a_torchao_recipe_says_what_it_quantizes(entry, grad, granularity, scale):
    (cell,) = cells(grid={"formats": [entry], "seeds": [0]}).values()
    (rule,) = cell.rules
    assert (rule.layers, rule.weight.format, rule.input.format, rule.grad.format) == ("blocks.*", "E4M3", "E4M3", grad)
    assert all((spec.granularity, spec.scale) == (granularity, scale) for spec in (rule.weight, rule.input, rule.grad))
    assert set(cell.formats) == {"E4M3", grad}


# --- entries that name a recipe and its format ---------------------------------------------------


@pytest.mark.parametrize("recipe", TEMPLATES)
def test_an_entry_with_its_recipe_is_that_format_under_grid_recipe(recipe):
    (joint,) = cells(grid={"formats": [f"{recipe}.E3M4"], "seeds": [0]}).values()
    (alone,) = cells(grid={"formats": ["E3M4"], "seeds": [0], "recipe": recipe}).values()
    assert joint.key == f"{recipe}.E3M4-adamw-0-1" and joint.format == f"{recipe}.E3M4"
    assert joint.rules == alone.rules and joint.formats == alone.formats


def test_the_unquantized_control_differs_in_what_is_quantized_and_in_its_name():
    found = cells(grid={"formats": ["E3M4", "virtual.E3M4"], "seeds": [0]})
    there, here = found["E3M4-adamw-0-1"], found["virtual.E3M4-adamw-0-1"]
    assert [rule.weight.format for rule in (*there.rules, *here.rules)] == ["E3M4", "E3M4", "E3M4"]
    assert [rule.weight.virtual for rule in (*there.rules, *here.rules)] == [False, False, True]
    assert all(rule.input is rule.grad is None for rule in here.rules)
    sections = ("model", "arm", "train", "monitor", "optimizer", "seed", "lr_scale")
    assert all(getattr(there, section) == getattr(here, section) for section in sections)


def test_a_recipe_that_changes_has_the_rules_of_the_entries_that_it_names():
    sections = schedule(recipe="uniform_row") | {"formats": OWN}
    sections["recipes"]["new"]["schedule"] += [{"recipe": "E5M2", "when": {"nonfinite": True}}]
    sections["recipes"]["new"]["schedule"] += [{"recipe": "virtual.mine", "after": 0.75}]
    names = ["new.E3M4", "E3M4", "uniform_row.E3M4", "E5M2", "virtual.mine"]
    made = resolver(**sections, grid={"formats": names, "seeds": [0]})
    found, *expected = made.cells()
    assert [found.rules, *(switch.rules for switch in found.schedule)] == [cell.rules for cell in expected]
    assert [switch.recipe for switch in found.schedule] == names[2:]
    assert set(found.formats) == {"E3M4", "E5M2", "mine"} and not any(cell.schedule for cell in expected)
    assert set(made.selected()["recipes"]) == {"new", "uniform", "uniform_row", "virtual"}
    page = (PROJECT / "altgrad/training/SWITCHES.md").read_text()
    shown = YAML(typ="safe").load(page.split("```yaml\n")[1].split("```")[0])
    (cell,) = cells(**shown, grid={"formats": ["careful.E3M4"], "seeds": [0]}).values()
    assert [switch.recipe for switch in cell.schedule] == ["E5M2", "bf16"]


# --- mistakes ------------------------------------------------------------------------------------

CLIP = {"train": {"clip": 1}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("E4M3x", "grid.formats[1]: unknown format 'E4M3x'; did you mean E4M3 or"),
        ("uniform", "uses FORMAT"),
        ("virtal.E3M4", "grid.formats[1]: virtal.E3M4: 'virtal' is not in recipes; did you mean virtual?"),
        ("virtual.E3M9x", "grid.formats[1]: virtual.E3M9x: unknown format 'E3M9x'; did you mean E3M4"),
        ("virtual.", "grid.formats[1]: virtual.: unknown format ''"),
        (".E3M4", "grid.formats[1]: .E3M4: '' is not in recipes"),
        ("virtual.E3M4.E4M3", "unknown format 'E3M4.E4M3'"),
        ("E3M4.virtual", "'E3M4' is not in recipes; did you mean virtual.E3M4?"),
        ("bf16.E3M4", "recipes.bf16 does not use FORMAT, so it takes no format; write bf16 alone"),
        ("virtual", "recipes.virtual uses FORMAT, so it cannot be a grid entry itself; name a format with it in grid."),
        ("virtual.bf16", "bf16 is a recipe, and virtual takes a format; write virtual.E4M3, say"),
        ("emergency", "recipes.emergency uses FORMAT, so it cannot be a grid entry itself"),
        ("NVFP4_LAST_BF16.E4M3", "recipes.NVFP4_LAST_BF16 does not use FORMAT, so it takes no format"),
        ({"grid": {"baseline": "b16"}}, "grid.baseline"),
        ({"grid": {"recipe": "bf16"}}, "does not use FORMAT"),
        ({"grid": {"recipe": "ao_rowwise"}}, "does not use FORMAT"),
        ({"recipes": {"my.own": SHIPPED.recipes["uniform"]}}, "recipes.my.own: '.' joins a recipe and its format"),
        ({"recipes": {"adamw": []}}, "recipes.adamw: the name is taken"),
        ({"formats": {"my.own": OWN["mine"]}}, "formats.my.own: '.' joins a recipe and"),
        ({"formats": {"E4M3": OWN["mine"]}}, "formats.E4M3: the name is taken"),
        ({"formats": {"bf16": OWN["mine"]}}, "formats.bf16: the name is taken"),
        ({"optimizers": {"virtual.E4M3": SHIPPED.optimizers["adamw"]}}, "optimizers.virtual.E4M3: the name is taken"),
        (
            {"grid": {"optimizers": ["foreign_unmatched"]}, "optimizers": {"foreign_unmatched": {
                **SHIPPED.optimizers["foreign_unmatched"].model_dump(), "foreign": "E9M9"}}},
            "optimizers.foreign_unmatched.foreign: unknown format 'E9M9'",
        ),
        ({"overrides": {"E5M3x": CLIP}}, "overrides: 'E5M3x'"),
        ({"overrides": {"virtual.E9M9": CLIP}}, "'virtual.E9M9' is no format, recipe, arm"),
        ({"overrides": {"bf16.E4M3": CLIP}}, "'bf16.E4M3' is no format, recipe, arm"),
        ({"overrides": {"uniform": CLIP}}, "'uniform' is no format, recipe, arm, model or cell"),
        ({"overrides": {"E5M2-adamw-0": CLIP}}, "did you mean E5M2-adamw-0-1"),
        ({"overrides": {"E4M3-adamw-0-1.0": CLIP}}, "as E4M3-adamw-0-1"),
        ({"overrides": {"E4M3-adamw-00-1": CLIP}}, "as E4M3-adamw-0-1"),
        ({"overrides": {"E5M2": {"trian": {"clip": 1}}}}, "overrides.E5M2: unknown setting 'trian'"),
        ({"overrides": {"E5M2": {"train": {"clap": 1}}}}, "overrides.E5M2.train: unknown setting 'clap'"),
        ({"overrides": {"E5M2": {"train": {"clip": -1}}}}, "overrides.E5M2.train: clip"),
        ({"overrides": {"E5M2": {"recipe": "unifrom"}}}, "did you mean uniform"),
        ({"overrides": {"E5M2": {"recipe": "ao_rowwise"}}}, "does not use FORMAT"),
        ({"overrides": {"E7M0": {"arm": {"lr": -1}}}, "grid": {"formats": ["E4M3"]}}, "overrides.E7M0.arm: lr"),
        ({"overrides": {"adamw": {"arm": {"weight_decay": 0.1}}}}, "overrides.adamw.arm: weight_decay times the"),
        *(({"overrides": {selector: {"recipe": "weight_only"}}, "grid": {"formats": ["virtual.E3M4"]}},
           "virtual.E3M4 names its recipe itself, which cannot be weight_only")
          for selector in ("virtual.E3M4", "adamw")),
        (schedule(recipe="bf61"), "recipes.new.schedule[0].recipe: unknown format 'bf61'; did you mean"),
        (schedule(recipe="emergency"), "recipes.new.schedule[0].recipe: recipes.emergency changes during a run itself"),
    ],
)  # fmt: skip
def test_a_mistake_names_its_place(change, words):
    if isinstance(change, str):
        change = {"grid": {"formats": ["bf16", change]}}
    with pytest.raises(UserError) as raised:
        cells(**change)
    assert words in str(raised.value) and str(raised.value).startswith("params.yaml: ")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (schedule(after=None), "needs either after, a share of the steps, or when"),
        (schedule(when={"spike": 2}), "needs either after, a share of the steps, or when"),
        (schedule(after=None, when={}), "waits for nothing; write overflow: 0.01, spike: 1.5 or nonfinite: true"),
        (schedule(after=None, when={"spikes": 2}), "schedule[0].when: unknown setting 'spikes'; did you mean spike?"),
        (schedule(after=1.0), "recipes.new.schedule[0].after: input should be less than 1"),
        (schedule(after=0.001), "after 0.001 leaves one of the recipes no step of 200; take more steps"),
        (schedule(after=None, when={"overflow": 0.1}) | {"monitor": {"groups": []}}, "when overflow needs tensors in"),
        (schedule() | {"grid": {"optimizers": ["rung"]}}, "weights: quantized keeps the weights of rung in one format"),
        ({"recipes": {"new": {"recipe": "uniform", "schedule": [
            {"recipe": "bf16", "after": 0.5}, {"recipe": "E5M2", "after": 0.5}]}}}, "after 0.5 behind after 0.5; list"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_is_one_sentence(tmp_path, sections, words):
    """Some are refused when the file is read, others when its cells are resolved."""
    yaml = YAML()
    params = yaml.load(PROJECT / "params.yaml")
    for name, values in sections.items():
        params[name] |= values
    params["grid"]["formats"] = ["new.E4M3"]
    with open(tmp_path / "params.yaml", "w") as file:
        yaml.dump(params, file)
    with pytest.raises(UserError) as raised:
        list(Resolver(load_params(tmp_path / "params.yaml")).cells())
    assert words in str(raised.value) and "\n" not in str(raised.value)
