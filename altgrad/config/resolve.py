"""From params.yaml to cells: presets picked, recipes filled in, overrides applied, one file each.

An override's selector is an entry of the grid (see `altgrad.config.entries`), an arm, or a cell's key. When several
select the same cell, the narrower wins: entry, then arm, then key. A selector must name something that exists, though
not something in today's grid: an override for E5M2 stays in place while ``-S 'grid.formats=[E3M4]'`` trains another
format.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from altgrad.common.errors import UserError, did_you_mean
from altgrad.common.files import read_json, write_json, write_text
from altgrad.config.cell import Cell, cell_key
from altgrad.config.entries import JOINT, PLACEHOLDER, Entries
from altgrad.config.models import CellModel
from altgrad.config.params import require_name, validated
from altgrad.config.presets import merged
from altgrad.config.published import cell_model
from altgrad.config.recipe import ROLES
from altgrad.config.schema import Arm, Monitor, Params, Rule, Section, Train
from altgrad.config.switches import CellSwitch, ChangingRecipe
from altgrad.config.tasks import Classifier


class Override(Section):
    """What an override may set: any setting of these sections, and the recipe by name."""

    model: dict[str, Any] = Field({}, description="settings of the model, as in models")
    arm: dict[str, Any] = Field({}, description="settings of the arm, as in optimizers")
    train: dict[str, Any] = Field({}, description="settings as in train")
    monitor: dict[str, Any] = Field({}, description="settings as in monitor")
    recipe: str | None = Field(None, description="the recipe that a format's name alone stands for, by its name")


class Resolver:
    """Resolves the cells of one :class:`Params`; ``source`` is what messages call the file."""

    def __init__(self, params: Params, source: object = "params.yaml") -> None:
        self.params = params
        self.source = source
        model = cell_model(params.models[params.model], params.start)
        self.model = validated(CellModel, model, f"{source}: models.{params.model}")
        self.entries = Entries(params, source)
        for i, entry in enumerate(params.grid.formats):
            self.entries.require(entry, f"grid.formats[{i}]")
        self.entries.require(params.grid.baseline, "grid.baseline")
        self.overrides = {selector: self._override(selector) for selector in params.overrides}

    def cells(self) -> Iterator[Cell]:
        """Yield every cell in the order of the grid's lists, formats outermost."""
        grid = self.params.grid
        for combination in itertools.product(grid.formats, grid.optimizers, grid.seeds, grid.lr_scales):
            yield self._cell(*combination)

    def idle(self) -> list[str]:
        """Return the settings that select no cell of the grid: overrides, and a baseline."""
        selecting = {part for cell in self.cells() for part in (cell.format, cell.optimizer, cell.key)}
        named = {f"overrides.{selector}": selector for selector in self.overrides}
        named[f"grid.baseline {self.params.grid.baseline}"] = self.params.grid.baseline
        return [setting for setting, selector in named.items() if selector not in selecting]

    def selected(self) -> dict[str, Any]:
        """Return the settings that this grid uses, without the presets that it does not."""
        params = self.params.model_dump(mode="json")
        task = {"task": params["task"], "primary": self.params.classify.primary} if self.params.classify else {}
        grid = params["grid"]
        recipes = {grid["recipe"]} | {self.entries.parts(entry)[0] for entry in grid["formats"]}
        recipes |= {override.recipe for override in self.overrides.values() if override.recipe}
        changing = [found for name in recipes if isinstance(found := self.params.recipes[name], ChangingRecipe)]
        recipes |= {self.entries.parts(entry)[0] for found in changing for entry in found.names.values()}
        return {
            "model": {params["model"]: params["models"][params["model"]]},
            "grid": grid,
            "recipes": {name: rules for name, rules in params["recipes"].items() if name in recipes},
            "optimizers": {name: params["optimizers"][name] for name in grid["optimizers"]},
            "train": params["train"],
            "monitor": params["monitor"],
            "overrides": params["overrides"],
            **task,
            **({"start": params["start"]} if params["start"] else {}),
        }

    def _cell(self, entry: str, optimizer: str, seed: int, lr_scale: int | float) -> Cell:
        params = self.params
        key = cell_key(entry, optimizer, seed, lr_scale)
        recipe = None
        sections = {
            "model": self.model.model_dump(),
            "arm": params.optimizers[optimizer].model_dump(),
            "train": params.train.model_dump(),
            "monitor": params.monitor.model_dump(),
            **({"lora": params.lora.model_dump()} if params.lora else {}),
            **({"task": params.classify.model_dump(include=set(Classifier.model_fields))} if params.classify else {}),
        }
        applied = [selector for selector in (entry, optimizer, key) if selector in self.overrides]
        for selector in applied:
            override = self.overrides[selector]
            recipe = override.recipe or recipe
            for section in ("model", "arm", "train", "monitor"):
                sections[section] = merged(sections[section], getattr(override, section))
        recipe, rules, schedule = self._recipe(entry, recipe)
        every = [*rules, *(rule for switch in schedule for rule in switch.rules)]
        formats = self._formats(every, recipe)
        if foreign := sections["arm"].get("foreign"):  # which the arm takes its stiffness from
            formats[foreign] = self.entries.describe(foreign, f"optimizers.{optimizer}.foreign")
        values = {
            "key": key, "format": entry, "optimizer": optimizer, "seed": seed, "lr_scale": lr_scale,
            "rules": rules, "schedule": schedule, "formats": formats, **sections,
        }  # fmt: skip
        where = ", ".join(f"overrides.{selector}" for selector in applied) or f"cell {key}"
        return validated(Cell, values, f"{self.source}: {where}")

    def _recipe(self, entry: str, recipe: str | None) -> tuple[str, list[Rule], list[CellSwitch]]:
        """Return the recipe's name, the rules of ``entry`` and what takes over from them.

        The placeholder is replaced by its format.
        """
        own, fmt = self.entries.parts(entry)
        if recipe is not None and JOINT in entry:
            raise UserError(f"{self.source}: overrides: {entry} names its recipe itself, which cannot be {recipe}")
        name = recipe or own
        is_open = self.entries.is_template(name)
        if fmt is None and is_open:
            raise UserError(
                f"{self.source}: recipes.{name} uses {PLACEHOLDER}, so it cannot be a grid entry itself; "
                f"name a format with it in grid.formats, such as {name}{JOINT}E4M3"
            )
        if fmt is not None and not is_open:
            raise UserError(
                f"{self.source}: recipes.{name} does not use {PLACEHOLDER}, so every format would train "
                f"alike; write {PLACEHOLDER} in it, or name it in grid.formats instead"
            )
        found = self.params.recipes[name]
        if not isinstance(found, ChangingRecipe):
            return name, self._rules(name, fmt), []
        schedule = []
        for switch in found.schedule:
            own, its = self.entries.parts(switch.recipe)
            joined = f"{own}{JOINT}{fmt}" if its is None and self.entries.is_template(own) else switch.recipe
            rules = self._rules(own, its or fmt)
            schedule.append(CellSwitch.model_validate(switch.model_dump() | {"recipe": joined, "rules": rules}))
        own, its = self.entries.parts(found.recipe)
        return name, self._rules(own, its or fmt), schedule

    def _rules(self, recipe: str, fmt: str | None) -> list[Rule]:
        """Return the rules of ``recipe`` with the placeholder replaced by ``fmt``."""
        found = self.params.recipes[recipe]
        assert isinstance(found, list)
        rules = [rule.model_dump() for rule in found]
        for spec in (rule[role] for rule in rules for role in ROLES):
            if spec is not None and spec["format"] == PLACEHOLDER:
                spec["format"] = fmt
        return [Rule.model_validate(rule) for rule in rules]

    def _formats(self, rules: list[Rule], recipe: str) -> dict[str, dict[str, Any]]:
        specs = [getattr(rule, role) for rule in rules for role in ROLES]
        names = {spec.format for spec in specs if spec is not None}
        return {name: self.entries.describe(name, f"recipes.{recipe}") for name in sorted(names)}

    def _override(self, selector: str) -> Override:
        place = f"overrides.{selector}"
        params = self.params
        if selector not in params.optimizers and not self.entries.has(selector):
            self._require_key(selector)
        override = validated(Override, params.overrides[selector], f"{self.source}: {place}")
        if override.recipe is not None:
            require_name(override.recipe, params.recipes, self.source, f"{place}.recipe", "recipes")
        arms = [name for name in (selector, *selector.split("-")) if name in params.optimizers]
        for section, schema, bases in (
            ("model", CellModel, [self.model]),
            ("arm", Arm, [params.optimizers[name] for name in arms or params.grid.optimizers]),
            ("train", Train, [params.train]),
            ("monitor", Monitor, [params.monitor]),
        ):  # also when it selects nothing in today's grid
            for base in bases:
                content = merged(base.model_dump(), getattr(override, section))
                validated(schema, content, f"{self.source}: {place}.{section}")
        return override

    def _require_key(self, selector: str) -> None:
        """Raise unless ``selector`` is format-arm-seed-lr_scale, each part valid."""
        params = self.params
        parts = selector.split("-", 3)
        named = len(parts) == 4 and self.entries.has(parts[0]) and parts[1] in params.optimizers
        if named and parts[2].isdigit() and _is_number(parts[3]):
            # The key is what DVC makes of the grid's values; 1.0 for 1 would select nothing.
            number = float(parts[3])
            same = [value for value in params.grid.lr_scales if value == number]
            spellings = same or [number, *([int(number)] if number.is_integer() else [])]
            keys = [cell_key(parts[0], parts[1], int(parts[2]), value) for value in spellings]
            if selector not in keys:
                raise UserError(f"{self.source}: overrides: write {selector} as {keys[0]}")
            return
        known = [*params.grid.formats, *params.recipes, *params.optimizers]
        known += [cell_key(*c) for c in itertools.product(
            params.grid.formats, params.grid.optimizers, params.grid.seeds, params.grid.lr_scales)]  # fmt: skip
        hint = did_you_mean(selector, known)
        hint = hint if "did you mean" in hint else f", such as {known[-1]}"
        raise UserError(f"{self.source}: overrides: {selector!r} is no format, recipe, arm or cell{hint}")


def _is_number(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def write_grid(cells: list[Cell], selected: dict[str, Any], out: Path) -> None:
    """Write ``out/<key>.json`` for each cell and ``out/index.json`` with their order and the settings."""
    for cell in cells:
        write_text(out / f"{cell.key}.json", cell.to_json())
    write_json(out / "index.json", {"cells": [cell.key for cell in cells], "params": selected})


def position_in_grid(directory: Path, key: str) -> str:
    """Return ``3/12`` for the third of twelve cells, or nothing when the index does not name ``key``."""
    index = directory / "index.json"
    cells = read_json(index)["cells"] if index.exists() else []
    return f"[{cells.index(key) + 1}/{len(cells)}]" if key in cells else ""
