"""Laws of overrides: each setting of each section takes effect, the narrower of two selectors wins, and mappings merge.

Oracle: the schema's own reading of the values. The table is the schema itself, so a new setting is in it at once;
`GIVEN` has those whose values cannot be made from their type, or that mean something beside others alone.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, get_args, get_origin

import pytest

from altgrad.config import Cell, Resolver
from altgrad.config.arms import Arm
from altgrad.config.models import CellModel
from altgrad.config.resolve import Override
from altgrad.config.schema import MonitorSettings, Train
from tests.config.test_resolve import SHIPPED

KEY = "E5M2-adamw-0-1"
GRID = {"formats": ["E4M3", "E5M2"], "optimizers": ["adamw", "other"], "seeds": [0]}
PARAMS = SHIPPED.model_copy(update={  # without most of the presets, which take time
    "grid": SHIPPED.grid.model_copy(update=GRID),
    "optimizers": dict.fromkeys(GRID["optimizers"], SHIPPED.optimizers["adamw"]),
    "recipes": {name: SHIPPED.recipes[name] for name in ("bf16", "uniform", "uniform_row", "weight_only", "virtual")},
})  # fmt: skip
SELECTORS = ("E5M2", "adamw", KEY)  # from the widest to the narrowest
SECTIONS: dict[str, Any] = {"model": CellModel, "arm": Arm, "train": Train, "monitor": MonitorSettings}
BASES: dict[str, Any] = {
    "model": CellModel.model_validate(SHIPPED.models[SHIPPED.model].model_dump()), "arm": SHIPPED.optimizers["adamw"],
    "train": SHIPPED.train, "monitor": SHIPPED.monitor,
}  # fmt: skip
QUANTIZED, PROFILE = {"weights": "quantized"}, {"stiffness": "profile", "knee": 9.0, "slope": 0.5}
#: section.setting -> two values of it, and the settings that it needs beside it
GIVEN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "model.width": (32, 96, {}), "model.heads": (1, 4, {}), "model.context": (32, 16, {}),
    "model.rope_theta": (500.0, 1000.0, {"positions": "rope"}), "model.kv_heads": (1, 2, {}),
    "model.head_dim": (16, 8, {}), "model.experts": (2, 4, {}),
    "arm.betas": ((0.8, 0.9), (0.7, 0.8), {}), "arm.base": ("madam", "muon", {}), "arm.momentum": (
        0.8, 0.7, {"base": "sgd", "betas": (0.9, 0.999), "stiffness": "ulp", "match_rms": True}),
    "arm.weight_decay": (0.1, 0.2, {"decay": None, "plain_decay": None}),
    "arm.stiffness": ("ulp", "mantissa", {}), "arm.acts": ("gradient", "update", {"stiffness": "ulp"}),
    "arm.power": (2, 1, {"stiffness": "ulp"}), "arm.normalise": ("none", "rms", {"stiffness": "ulp"}),
    "arm.schedule": ("linear", "cosine", {"stiffness": "ulp"}),
    "arm.foreign": ("E4M3", "E3M4", {"stiffness": "foreign"}),
    "arm.knee": (8.0, 7.0, PROFILE), "arm.slope": (0.25, 0.75, PROFILE), "arm.store": ("codes", "float32", QUANTIZED),
    "arm.rounding": ("stochastic", "selective", QUANTIZED), "arm.held_scale": ("fixed", "reestimated", QUANTIZED),
    "arm.feedback": ("momentum", None, QUANTIZED),
    "arm.max_rungs": (7, 6, {"base": "rung", "rounding": "stochastic", **QUANTIZED}),
    "arm.state": ({"m": {"format": "E4M3"}}, {"m": {"format": "E5M2"}}, {}),
    "train.cooldown": (0.2, 0.3, {}),
    "train.divergence": ({"spike": 3.0}, {"spike": 4.0}, {}), "train.device": ("cpu", "auto", {}),
    "monitor.groups": (["outputs"], ["tensors"], {}), "monitor.intervals": ({"updates": 9}, {"updates": 8}, {}),
    "recipe": ("weight_only", "uniform_row", {}),
}  # fmt: skip
SETTINGS = [f"{section}.{name}" for section, schema in SECTIONS.items() for name in schema.model_fields]
SETTINGS.remove("model.start")  # resolved weights, which params.yaml names elsewhere
SETTINGS.append("recipe")


def two_values(setting: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return two values of ``setting``, by its type and its value in params.yaml, and what it needs beside it."""
    if setting in GIVEN:
        return GIVEN[setting]
    section, name = setting.split(".")
    value, kind = getattr(BASES[section], name), SECTIONS[section].model_fields[name].annotation
    if kind is bool:
        return not value, value, {}
    if get_origin(kind) is Literal:
        others = [choice for choice in get_args(kind) if choice != value]
        return others[0], others[1] if others[1:] else value, {}
    assert type(value) in (int, float), f"{setting} has no row in GIVEN"
    return (value + 1, value + 2, {}) if kind is int else (*((value / 2, value / 4) if value else (0.1, 0.2)), {})


def override(setting: str, value: Any, beside: dict[str, Any]) -> dict[str, Any]:
    section, _, name = setting.partition(".")
    return {section: {**beside, name: value}} if name else {section: value}


def found(setting: str, cell: Cell) -> Any:
    section, _, name = setting.partition(".")
    return cell.rules if setting == "recipe" else getattr(getattr(cell, section), name)


def expected(setting: str, value: Any, beside: dict[str, Any]) -> dict[str, Any]:
    """Return by cell what the schema makes of ``value`` alone, and of a recipe what it is as the grid's own."""
    section, _, name = setting.partition(".")
    if setting == "recipe":
        return {key: cell.rules for key, cell in cells(recipe=value).items()}
    base = {key: its for key, its in BASES[section].model_dump().items() if key not in beside}
    nested = isinstance(value, dict) and isinstance(base.get(name), dict)
    made = SECTIONS[section].model_validate(base | beside | {name: base[name] | value if nested else value})
    return dict.fromkeys(PLAIN, getattr(made, name))


def resolver(overrides: dict[str, Any] | None = None, monitor: Any = PARAMS.monitor, **grid: Any) -> Resolver:
    sections = {"grid": PARAMS.grid.model_copy(update=grid), "monitor": monitor, "overrides": overrides or {}}
    return Resolver(PARAMS.model_copy(update=sections))


def cells(overrides: dict[str, Any] | None = None, **sections: Any) -> dict[str, Cell]:
    return {cell.key: cell for cell in resolver(overrides, **sections).cells()}


PLAIN = cells()


def test_the_table_has_all_that_an_override_may_set():
    assert {setting.split(".")[0] for setting in SETTINGS} == set(Override.model_fields)
    assert set(GIVEN) <= set(SETTINGS)


@pytest.mark.parametrize("section", Override.model_fields)
def test_every_setting_of_an_override_takes_effect_and_the_narrower_one_wins(section):
    """Two selectors at a time, each pair of values both ways round: one of the two is often the default."""
    for setting in (setting for setting in SETTINGS if setting.split(".")[0] == section):
        *values, beside = two_values(setting)
        wanted = [expected(setting, value, beside) for value in values]
        assert wanted[0] != wanted[1] and found(setting, PLAIN[KEY]) != wanted[0][KEY], setting
        for selector in SELECTORS:
            after = cells({selector: override(setting, values[0], beside)})
            selected = {key for key, cell in PLAIN.items() if selector in (cell.format, cell.optimizer, key)}
            changed = {key for key in PLAIN if found(setting, after[key]) == wanted[0][key]}
            assert changed == selected, (setting, selector)
            assert all(after[key] == PLAIN[key] for key in PLAIN.keys() - selected), (setting, selector)
        for (wide, narrow), (other, own) in itertools.product(itertools.combinations(SELECTORS, 2), ((0, 1), (1, 0))):
            both = {narrow: override(setting, values[own], beside), wide: override(setting, values[other], beside)}
            assert found(setting, cells(both)[KEY]) == wanted[own][KEY], (setting, wide, narrow)


def test_nested_settings_merge():
    """What an override of a mapping leaves out stays, be it from params.yaml or from a wider override."""
    sections = {
        "E5M2": {"train": {"divergence": {"spike": 9.0}}, "monitor": {"intervals": {"updates": 9}},
                 "arm": {"state": {"m": {"format": "E4M3", "granularity": "row"}}}},
        "adamw": {"train": {"divergence": {"window": 7}}, "monitor": {"intervals": {"outputs": 8}},
                  "arm": {"state": {"v": {"format": "E5M2"}}}},
    }  # fmt: skip
    cell = cells(sections, monitor=PARAMS.monitor.but(intervals={"tensors": 5}))[KEY]
    assert (cell.train.divergence.spike, cell.train.divergence.window) == (9.0, 7)
    assert cell.monitor.intervals == {"tensors": 5, "updates": 9, "outputs": 8}
    assert (cell.arm.state.m.granularity, cell.arm.state.v.format) == ("row", "E5M2")


def test_what_selects_no_cell_is_idle_and_changes_none():
    for formats, idle in ((["bf16", "E5M2"], []), (["E5M2"], ["grid.baseline bf16"])):
        assert resolver(formats=formats).idle() == idle
    outside = ("E3M4", "E5M2-adamw-7-1", "E5M2-adamw-0-2", "E5M2-adamw-0-2.0", "E5M2-adamw-0-1e-05", "virtual.E4M3")
    overrides = {name: {"train": {"clip": 0.5}} for name in (*SELECTORS, *outside)}
    assert resolver(overrides, baseline="E4M3").idle() == [f"overrides.{name}" for name in outside]
    assert cells({name: overrides[name] for name in outside}) == PLAIN


@pytest.mark.parametrize("selector", ["virtual.E3M4", "virtual.E3M4-adamw-0-0.5"])
def test_an_override_selects_an_entry_that_names_its_recipe(selector):
    found = cells({selector: {"train": {"clip": 0.25}}}, formats=["E3M4", "virtual.E3M4"], lr_scales=[0.5])
    selected = {key for key in found if selector in (found[key].format, key)}
    assert selected and {key for key, cell in found.items() if cell.train.clip == 0.25} == selected
