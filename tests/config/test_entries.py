"""Grid entries that name a recipe and its format, such as ``virtual.E3M4``.

Oracles: the same recipe as ``grid.recipe``, and DVC's own naming of matrix stages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from altgrad.config import Cell, Resolver, UserError, cell_key, load_params, write_grid
from altgrad.config.cell import position_in_grid
from tests.config.test_resolve import changed

PROJECT = Path(__file__).parents[2]
SHIPPED = load_params(PROJECT / "params.yaml")
TEMPLATES = ["virtual", "uniform", "uniform_delayed", "uniform_row", "uniform_block", "weight_only", "mlp_only"]


def resolver(**sections) -> Resolver:
    return Resolver(changed(**sections))


def cells(**sections):
    return {cell.key: cell for cell in resolver(**sections).cells()}


@pytest.mark.parametrize("recipe", TEMPLATES)
def test_an_entry_with_its_recipe_is_that_format_under_grid_recipe(recipe):
    (joint,) = cells(grid={"formats": [f"{recipe}.E3M4"], "seeds": [0], "baseline": "bf16"}).values()
    (alone,) = cells(grid={"formats": ["E3M4"], "seeds": [0], "recipe": recipe, "baseline": "bf16"}).values()
    assert joint.key == f"{recipe}.E3M4-adamw-0-1" and joint.format == f"{recipe}.E3M4"
    assert joint.rules == alone.rules and joint.formats == alone.formats


def test_a_twin_differs_in_what_is_quantized_and_in_its_name():
    found = cells(grid={"formats": ["E3M4", "virtual.E3M4"], "seeds": [0]})
    there, here = found["E3M4-adamw-0-1"], found["virtual.E3M4-adamw-0-1"]
    assert [rule.weight.format for rule in (*there.rules, *here.rules)] == ["E3M4", "E3M4", "E3M4"]
    assert [rule.weight.virtual for rule in (*there.rules, *here.rules)] == [False, False, True]
    values = here.model_dump(mode="json")
    assert values["format"] == "virtual.E3M4"
    assert [rule["weight"]["virtual"] for rule in values["rules"]] == [True]
    assert all(rule["input"] is rule["grad"] is None for rule in values["rules"])
    sections = ("model", "arm", "train", "monitor", "optimizer", "seed", "lr_scale")
    assert all(getattr(there, section) == getattr(here, section) for section in sections)


@pytest.mark.parametrize("selector", ["virtual.E3M4", "virtual.E3M4-adamw-0-0.5"])
def test_an_override_selects_it(selector):
    grid = {"formats": ["E3M4", "virtual.E3M4"], "seeds": [0], "lr_scales": [0.5]}
    made = resolver(grid=grid, overrides={selector: {"train": {"clip": 0.25}}})
    assert made.idle() == ["grid.baseline bf16"]
    clips = {cell.format: cell.train.clip for cell in made.cells()}
    assert clips == {"E3M4": SHIPPED.train.clip, "virtual.E3M4": 0.25}


def test_the_recipes_that_entries_name_are_kept_with_the_grid(tmp_path):
    made = resolver(grid={"formats": ["bf16", "virtual.E3M4"], "seeds": [0]})
    assert set(made.selected()["recipes"]) == {"bf16", "uniform", "virtual"}
    write_grid(list(made.cells()), made.selected(), tmp_path)
    assert position_in_grid(tmp_path, "virtual.E3M4-adamw-0-1") == "[2/2]"


def schedule(**switch):
    """Return a change to params.yaml: a recipe called new, which changes after half of the steps unless told."""
    return {"recipes": {"new": {"recipe": "uniform", "schedule": [{"recipe": "bf16", "after": 0.5} | switch]}}}


def test_a_recipe_that_changes_has_the_rules_of_the_entries_that_it_names():
    sections = schedule(recipe="uniform_row") | {"formats": {"mine": {"exponent_bits": 4, "mantissa_bits": 1}}}
    sections["recipes"]["new"]["schedule"] += [{"recipe": "E5M2", "when": {"nonfinite": True}}]
    sections["recipes"]["new"]["schedule"] += [{"recipe": "virtual.mine", "after": 0.75}]
    names = ["new.E3M4", "E3M4", "uniform_row.E3M4", "E5M2", "virtual.mine"]
    made = resolver(**sections, grid={"formats": names, "seeds": [0], "baseline": "E5M2"})
    found, *expected = made.cells()
    assert [found.rules, *(switch.rules for switch in found.schedule)] == [cell.rules for cell in expected]
    assert [switch.recipe for switch in found.schedule] == names[2:]
    assert set(found.formats) == {"E3M4", "E5M2", "mine"} and not any(cell.schedule for cell in expected)
    assert {"new", "uniform", "uniform_row", "virtual"} <= set(made.selected()["recipes"])
    assert Cell.model_validate_json(found.to_json()) == found


def test_the_recipe_of_the_page_is_one():
    page = (PROJECT / "altgrad/training/SWITCHES.md").read_text()
    shown = YAML(typ="safe").load(page.split("```yaml\n")[1].split("```")[0])
    (cell,) = cells(**shown, grid={"formats": ["careful.E3M4"], "seeds": [0]}).values()
    assert [switch.recipe for switch in cell.schedule] == ["E5M2", "bf16"]


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
    """By the file's own reading, and by the cells that are resolved of it."""
    yaml = YAML()
    params = yaml.load(PROJECT / "params.yaml")
    for name, values in ({"grid": {"formats": ["new.E4M3"]}} | sections).items():
        params[name] |= values
    params["grid"]["formats"] = ["new.E4M3"]
    with open(tmp_path / "params.yaml", "w") as file:
        yaml.dump(params, file)
    with pytest.raises(UserError) as raised:
        list(Resolver(load_params(tmp_path / "params.yaml")).cells())
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("virtal.E3M4", "grid.formats[1]: virtal.E3M4: 'virtal' is not in recipes; did you mean virtual?"),
        ("virtual.E3M9x", "grid.formats[1]: virtual.E3M9x: unknown format 'E3M9x'; did you mean E3M4"),
        ("virtual.", "grid.formats[1]: virtual.: unknown format ''"),
        (".E3M4", "grid.formats[1]: .E3M4: '' is not in recipes"),
        ("virtual.E3M4.E4M3", "unknown format 'E3M4.E4M3'"),
        ("E3M4.virtual", "'E3M4' is not in recipes; did you mean virtual.E3M4?"),
        ("bf16.E3M4", "recipes.bf16 does not use FORMAT, so it takes no format; write bf16 alone"),
        ("virtual", "recipes.virtual uses FORMAT, so it cannot be a grid entry itself; name a format with it in grid."),
        ("virtual.bf16", "bf16 is a recipe, and virtual takes a format; write virtual.E4M3, say"),
        ({"recipes": {"my.own": SHIPPED.recipes["uniform"]}}, "recipes.my.own: '.' joins a recipe and its format"),
        ({"formats": {"my.own": {"exponent_bits": 4, "mantissa_bits": 3}}}, "formats.my.own: '.' joins a recipe and"),
        ({"optimizers": {"virtual.E4M3": SHIPPED.optimizers["adamw"]}}, "optimizers.virtual.E4M3: the name is taken"),
        ({"overrides": {"virtual.E9M9": {"train": {"clip": 1}}}}, "'virtual.E9M9' is no format, recipe, arm"),
        ({"overrides": {"bf16.E4M3": {"train": {"clip": 1}}}}, "'bf16.E4M3' is no format, recipe, arm"),
        ("emergency", "recipes.emergency uses FORMAT, so it cannot be a grid entry itself"),
        ("NVFP4_LAST_BF16.E4M3", "recipes.NVFP4_LAST_BF16 does not use FORMAT, so it takes no format"),
        (schedule(recipe="bf61"), "recipes.new.schedule[0].recipe: unknown format 'bf61'; did you mean"),
        (schedule(recipe="emergency"), "recipes.new.schedule[0].recipe: recipes.emergency changes during a run itself"),
    ],
)
def test_a_mistake_names_its_place(change, words):
    if isinstance(change, str):
        change = {"grid": {"formats": ["bf16", change]}}
    with pytest.raises(UserError) as raised:
        cells(**change)
    assert words in str(raised.value) and str(raised.value).startswith("params.yaml: ")


@pytest.mark.parametrize("selector", ["virtual.E3M4", "adamw"])
def test_an_override_cannot_take_its_recipe_away(selector):
    grid = {"formats": ["virtual.E3M4"], "seeds": [0], "baseline": "bf16"}
    with pytest.raises(UserError, match="virtual.E3M4 names its recipe itself, which cannot be weight_only"):
        cells(grid=grid, overrides={selector: {"recipe": "weight_only"}})


def test_dvc_takes_its_keys(tmp_path):
    formats, scales = ["bf16", "virtual.E3M4", "uniform_row.E4M3"], [0.5, 1]
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
