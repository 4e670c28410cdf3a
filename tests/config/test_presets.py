"""Laws of presets: every one can be trained, and an own entry changes what it says and nothing else.

Oracle: the preset's settings, read apart from the schema, with the changes written into them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from altgrad.common.files import read_yaml
from altgrad.config import Resolver, UserError, load_params
from altgrad.config.arms import Arm
from altgrad.config.params import PRESETS as FILE
from altgrad.config.params import SECTIONS, Params, validated
from altgrad.config.recipe import published_recipes

SHIPPED = Path(__file__).parents[2] / "params.yaml"
PRESETS = YAML(typ="safe", pure=True).load(FILE)


def read(**changes: Any) -> Params:
    return validated(Params, read_yaml(SHIPPED) | changes, "params.yaml")


def test_the_default_grid_is_made_of_presets_alone():
    """So that params.yaml holds what somebody set, and no list of what could be."""
    own = read_yaml(SHIPPED)
    assert [own[name] for name in ("optimizers", "recipes", "models", "formats", "overrides")] == [{}, {}, {}, {}, {}]
    assert len(SHIPPED.read_text().splitlines()) <= 120
    assert len(list(Resolver(load_params(SHIPPED)).cells())) == 120


@pytest.mark.parametrize("name", PRESETS["optimizers"])
def test_every_preset_arm_is_an_arm_by_its_settings_alone(name: str):
    assert read().optimizers[name] == Arm.model_validate(PRESETS["optimizers"][name])


@pytest.mark.parametrize("name", [*PRESETS["recipes"], *published_recipes()])
def test_every_preset_recipe_can_be_trained(name: str):
    grid = read_yaml(SHIPPED)["grid"]
    params = read()
    entry = f"{name}.E4M3" if Resolver(params).names.is_template(name) else name
    cells = list(Resolver(read(grid=grid | {"formats": [entry], "optimizers": ["adamw"]})).cells())
    assert cells[-1].format == entry


@pytest.mark.parametrize(
    ("section", "name", "own", "expected"),
    [
        ("optimizers", "muon", {"lr": 0.006}, PRESETS["optimizers"]["muon"] | {"lr": 0.006}),
        ("optimizers", "adamw_coat", {"state": {"m": {"block": 64}}}, PRESETS["optimizers"]["adamw_coat"] | {"state": {
            "m": {"format": "E4M3", "block": 64, "expand": True}, "v": {"format": "E4M3", "block": 128, "expand": True},
        }}),
        ("optimizers", "muon", {"base": "sgd", "lr": 1.0}, {"base": "sgd", "lr": 1.0}),
        ("models", "micro", {"threads": 4}, PRESETS["models"]["micro"] | {"threads": 4}),
        ("corpora", "eurlex", {"fallback": "wikitext"}, PRESETS["corpora"]["eurlex"] | {"fallback": "wikitext"}),
        ("corpora", "eurlex", {"source": "local", "path": "texts"}, {"source": "local", "path": "texts"}),
        ("recipes", "uniform", [{"layers": "*", "weight": "E4M3"}], [{"layers": "*", "weight": "E4M3"}]),
    ],
)  # fmt: skip
def test_an_own_entry_changes_what_it_says_of_a_preset_and_nothing_else(section, name, own, expected):
    """One that says its base, source or folder is whole: no setting of the preset shows through."""
    shipped = read_yaml(SHIPPED)[section]
    before, after, alone = read(), *(read(**{section: shipped | its}) for its in ({name: own}, {"alone": expected}))
    assert getattr(after, section)[name] == getattr(alone, section)["alone"] != getattr(before, section)[name]
    others = {key: {k: v for k, v in getattr(after, key).items() if (key, k) != (section, name)} for key in SECTIONS}
    assert others == {
        key: {k: v for k, v in getattr(before, key).items() if (key, k) != (section, name)} for key in SECTIONS
    }


def test_a_preset_that_gets_an_unknown_setting_is_refused_by_its_name():
    with pytest.raises(UserError, match=r"optimizers.muon.*unknown setting 'mometum'; did you mean momentum"):
        read(optimizers={"muon": {"mometum": 0.9}})


def test_the_command_lists_them():
    command = [sys.executable, "-m", "altgrad.config", "--presets"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert YAML(typ="safe", pure=True).load(listed) == PRESETS | published_recipes()
