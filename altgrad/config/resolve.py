"""From params.yaml to cells: what a name in the grid stands for, recipes filled in, overrides applied.

An entry of ``grid.formats`` is a recipe (``bf16``), a format for the recipe of ``grid.recipe`` (``E3M4``), or both
(``virtual.E3M4``). An override's selector is a model, an entry, an arm, or a cell's key. When several select the same
cell, the narrower wins: model, then entry, then arm, then key. A selector must name something that exists, but it need
not be in today's grid: an override for E5M2 stays in place while ``-S 'grid.formats=[E3M4]'`` trains another format.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from altgrad.common.errors import UserError, did_you_mean
from altgrad.config.arms import Arm
from altgrad.config.base import Settings
from altgrad.config.cell import Cell, cell_key
from altgrad.config.models import CellModel, cell_model
from altgrad.config.own_formats import OwnFloat, OwnValues
from altgrad.config.params import CellSwitch, ChangingRecipe, Params, merged, require_name, validated
from altgrad.config.recipe import ROLES, Rule
from altgrad.config.schema import MonitorSettings, Train
from altgrad.config.tasks import Classifier
from altgrad.formats import Format, get_format

PLACEHOLDER = "FORMAT"  # in a recipe, stands for the format of the grid's entry
JOINT = "."  # joins a recipe and its format in an entry


def training_format(name: str, own: OwnFloat | OwnValues | None = None) -> Format:
    """Return the format called ``name``, or the user's own that ``own`` defines.

    Raises ``ValueError`` for an unknown name, an impossible definition, and a format that training cannot compute.
    """
    fmt = get_format(name) if own is None else own.format(name)
    if not fmt.signed:
        raise ValueError(f"{name} is unsigned, and weights and gradients have a sign")
    if not fmt.rounds_in_float32:
        raise ValueError(
            f"{name} spans more than training can round in float32; up to 7 exponent bits with the usual bias fit"
        )
    return fmt


class GridNames:
    """The names that a grid of ``params`` can have; ``source`` is the file's name in messages.

    Raises :class:`UserError` where a name could mean two things, and where a format of the user's own is impossible.
    """

    def __init__(self, params: Params, source: object) -> None:
        self.params = params
        self.source = source
        self._require_distinct_names()
        for name, recipe in params.recipes.items():
            for setting, entry in recipe.names.items() if isinstance(recipe, ChangingRecipe) else ():
                first = self.parts(entry)[0]
                if isinstance(params.recipes.get(first), ChangingRecipe):
                    raise self._error(
                        f"recipes.{name}.{setting}",
                        f"recipes.{first} changes during a run itself; name a recipe that does not",
                    )
                self.require(entry, f"recipes.{name}.{setting}")

    def parts(self, entry: str) -> tuple[str, str | None]:
        """Return the names (recipe, format) in ``entry``; the format is ``None`` where ``entry`` is a recipe alone."""
        if entry in self.params.recipes:
            return entry, None
        recipe, joint, fmt = entry.partition(JOINT)
        return (recipe, fmt) if joint else (self.params.grid.recipe, entry)

    def require(self, entry: str, setting: str) -> None:
        """Raise :class:`UserError` unless ``entry`` can stand in a grid; the error names ``setting`` as its place."""
        if entry in self.params.recipes:
            return
        if JOINT in entry:
            self._require_joint_entry(entry, setting)
            return
        try:
            self.format(entry, setting)
        except UserError as error:
            hint = did_you_mean(entry, self.params.recipes)
            also = f"; as a recipe, {hint.removeprefix('; ')}" if "did you mean" in hint else ""
            raise UserError(f"{error}{also}") from None

    def has(self, name: str) -> bool:
        """Whether ``name`` can stand in a grid by itself."""
        if name in self.params.recipes:
            return not self.is_template(name)
        try:
            self.require(name, "")
        except UserError:
            return False
        return True

    def format(self, name: str, setting: str) -> Format:
        """Return the format called ``name``; raise :class:`UserError` with ``setting`` if it cannot be trained."""
        try:
            return training_format(name, self.params.formats.get(name))
        except ValueError as error:
            raise self._error(setting, str(error)) from None

    def is_template(self, recipe: str) -> bool:
        """Whether ``recipe`` uses the placeholder, so that it needs a format to be an entry of the grid."""
        content = self.params.recipes[recipe]
        if isinstance(content, ChangingRecipe):
            return any(name in self.params.recipes and self.is_template(name) for name in content.names.values())
        tensors = [getattr(rule, role) for rule in content for role in ROLES]
        return any(tensor is not None and tensor.format == PLACEHOLDER for tensor in tensors)

    def _require_joint_entry(self, entry: str, setting: str) -> None:
        """Raise :class:`UserError` unless ``entry`` is ``recipe.format``, and the recipe uses the placeholder."""
        recipe, _, fmt = entry.partition(JOINT)
        setting = f"{setting}: {entry}"
        if recipe not in self.params.recipes:
            swapped = f"; did you mean {fmt}{JOINT}{recipe}?" if fmt in self.params.recipes else None
            hint = swapped or did_you_mean(recipe, self.params.recipes)
            raise self._error(setting, f"{recipe!r} is not in recipes{hint}")
        if not self.is_template(recipe):
            why = f"recipes.{recipe} does not use {PLACEHOLDER}, so it takes no format; write {recipe} alone"
            raise self._error(setting, why)
        if fmt in self.params.recipes:
            why = f"{fmt} is a recipe, and {recipe} takes a format; write {recipe}{JOINT}E4M3, say"
            raise self._error(setting, why)
        self.format(fmt, setting)

    def _require_distinct_names(self) -> None:
        """Raise :class:`UserError` for a name that means two things, and for an impossible format of the user's own."""
        params = self.params
        for name in params.formats:
            self.format(name, f"formats.{name}")
        taken = {
            "formats": lambda name: name in params.recipes or name == PLACEHOLDER or _is_known_format(name),
            "recipes": lambda name: name in params.optimizers or _is_known_format(name),
        }
        for section, is_taken in taken.items():
            for name in getattr(params, section):
                if is_taken(name):
                    raise self._error(f"{section}.{name}", "the name is taken; choose another")
                if JOINT in name:
                    why = f"{JOINT!r} joins a recipe and its format in grid.formats; choose a name without it"
                    raise self._error(f"{section}.{name}", why)
        for name in params.optimizers:
            if self.has(name):
                raise self._error(f"optimizers.{name}", "the name is taken; choose another")

    def _error(self, setting: str, problem: str) -> UserError:
        return UserError(f"{self.source}: {setting}: {problem}")


def _is_known_format(name: str) -> bool:
    try:
        training_format(name)
    except ValueError:
        return False
    return True


class Override(Settings):
    """What an override may set: any setting of these sections, and the recipe by name."""

    model: dict[str, Any] = Field({}, description="settings of the model, as in models")
    arm: dict[str, Any] = Field({}, description="settings of the arm, as in optimizers")
    train: dict[str, Any] = Field({}, description="settings as in train")
    monitor: dict[str, Any] = Field({}, description="settings as in monitor")
    recipe: str | None = Field(None, description="the recipe that a format's name alone stands for, by its name")


class Resolver:
    """Resolves the cells of ``params``; ``source`` is the file's name in messages."""

    def __init__(self, params: Params, source: object = "params.yaml") -> None:
        self.params = params
        self.source = source
        self.models = {name: self._model(name) for name in params.all_models}
        self.names = GridNames(params, source)
        for i, entry in enumerate(params.grid.formats):
            self.names.require(entry, f"grid.formats[{i}]")
        self.names.require(params.grid.baseline, "grid.baseline")
        for name in {*params.grid.models, *params.overrides} & set(params.all_models):
            if name in params.optimizers or self.names.has(name):
                raise UserError(f"{source}: models.{name}: a format, recipe or arm has that name; rename the model")
        self.overrides = {selector: self._override(selector) for selector in params.overrides}

    def _model(self, name: str) -> CellModel:
        """Return the model called ``name``; raise :class:`UserError` if its size contradicts the weights to start."""
        try:
            model = cell_model(self.params.models[name], self.params.start)
        except UserError as error:
            raise UserError(f"{error}; this is of grid.models: {name}" if self.params.grid.models else error) from None
        return validated(CellModel, model, f"{self.source}: models.{name}")

    def cells(self) -> Iterator[Cell]:
        """Yield every cell of ``model``, then those of ``grid.models``, in DVC's order: formats outermost."""
        grid = self.params.grid
        lists = grid.formats, grid.optimizers, grid.seeds, grid.lr_scales
        for combination in itertools.chain(itertools.product(*lists, [None]), itertools.product(*lists, grid.models)):
            yield self._cell(*combination)

    def idle(self) -> list[str]:
        """Return the overrides that select no cell, as ``overrides.E5M2``, and a baseline that is not in the grid."""
        selecting = {part for cell in self.cells() for part in (cell.format, cell.optimizer, cell.key)}
        selecting |= set(self.params.all_models)
        named = {f"overrides.{selector}": selector for selector in self.overrides}
        named[f"grid.baseline {self.params.grid.baseline}"] = self.params.grid.baseline
        return [setting for setting, selector in named.items() if selector not in selecting]

    def selected(self) -> dict[str, Any]:
        """Return the settings that this grid uses, by section, without presets that the grid does not use."""
        params = self.params.model_dump(mode="json")
        task = {"task": params["task"], "primary": self.params.classify.primary} if self.params.classify else {}
        grid = {name: value for name, value in params["grid"].items() if name != "models" or value}
        recipes = {grid["recipe"]} | {self.names.parts(entry)[0] for entry in grid["formats"]}
        recipes |= {override.recipe for override in self.overrides.values() if override.recipe}
        changing = [recipe for name in recipes if isinstance(recipe := self.params.recipes[name], ChangingRecipe)]
        recipes |= {self.names.parts(entry)[0] for recipe in changing for entry in recipe.names.values()}
        return {
            "model": {name: params["models"][name] for name in self.params.all_models},
            "grid": grid,
            "recipes": {name: rules for name, rules in params["recipes"].items() if name in recipes},
            "optimizers": {name: params["optimizers"][name] for name in grid["optimizers"]},
            "train": params["train"],
            "monitor": params["monitor"],
            "overrides": params["overrides"],
            **task,
            **({"start": params["start"]} if params["start"] else {}),
        }

    def _cell(self, entry: str, optimizer: str, seed: int, lr_scale: int | float, model_name: str | None) -> Cell:
        params = self.params
        key, model = cell_key(entry, optimizer, seed, lr_scale, model_name), model_name or params.model
        recipe = None
        sections = {
            "model": self.models[model].model_dump(),
            "arm": params.optimizers[optimizer].model_dump(),
            "train": params.train.model_dump(),
            "monitor": params.monitor.model_dump(),
            **({"lora": params.lora.model_dump()} if params.lora else {}),
            **({"task": params.classify.model_dump(include=set(Classifier.model_fields))} if params.classify else {}),
        }
        selectors = dict.fromkeys((model, entry, optimizer, key))
        applied = [selector for selector in selectors if selector in self.overrides]
        for selector in applied:
            override = self.overrides[selector]
            recipe = override.recipe or recipe
            for section in ("model", "arm", "train", "monitor"):
                sections[section] = merged(sections[section], getattr(override, section))
        recipe, rules, schedule = self._recipe(entry, recipe)
        every = [*rules, *(rule for switch in schedule for rule in switch.rules)]
        used = {tensor.format for rule in every for role in ROLES if (tensor := getattr(rule, role)) is not None}
        formats = {name: self.names.format(name, f"recipes.{recipe}") for name in sorted(used)}
        if foreign := sections["arm"].get("foreign"):  # the format whose spacing the arm uses
            formats[foreign] = self.names.format(foreign, f"optimizers.{optimizer}.foreign")
        values = {
            "key": key, "format": entry, "optimizer": optimizer, "seed": seed, "lr_scale": lr_scale,
            "rules": rules, "schedule": schedule, "formats": formats, "model_name": model_name, **sections,
        }  # fmt: skip
        where = ", ".join(f"overrides.{selector}" for selector in applied) or f"cell {key}"
        return validated(Cell, values, f"{self.source}: {where}")

    def _recipe(self, entry: str, recipe: str | None) -> tuple[str, list[Rule], list[CellSwitch]]:
        """Return (name of the recipe of ``entry``, its rules, the switches to other recipes).

        ``recipe`` is an override's and replaces the entry's recipe; ``None``: no override. The entry's format replaces
        the placeholder.
        """
        own, fmt = self.names.parts(entry)
        if recipe is not None and JOINT in entry:
            raise UserError(f"{self.source}: overrides: {entry} names its recipe itself, which cannot be {recipe}")
        name = recipe or own
        is_template = self.names.is_template(name)
        if fmt is None and is_template:
            raise UserError(
                f"{self.source}: recipes.{name} uses {PLACEHOLDER}, so it cannot be a grid entry itself; "
                f"name a format with it in grid.formats, such as {name}{JOINT}E4M3"
            )
        if fmt is not None and not is_template:
            raise UserError(
                f"{self.source}: recipes.{name} does not use {PLACEHOLDER}, so every format would train "
                f"alike; write {PLACEHOLDER} in it, or name it in grid.formats instead"
            )
        content = self.params.recipes[name]
        if not isinstance(content, ChangingRecipe):
            return name, self._rules(name, fmt), []
        schedule = []
        for switch in content.schedule:
            later, its = self.names.parts(switch.recipe)
            joined = f"{later}{JOINT}{fmt}" if its is None and self.names.is_template(later) else switch.recipe
            rules = self._rules(later, its or fmt)
            schedule.append(CellSwitch.model_validate(switch.model_dump() | {"recipe": joined, "rules": rules}))
        first, its = self.names.parts(content.recipe)
        return name, self._rules(first, its or fmt), schedule

    def _rules(self, recipe: str, fmt: str | None) -> list[Rule]:
        """Return the rules of ``recipe`` with the placeholder replaced by ``fmt``."""
        content = self.params.recipes[recipe]
        assert isinstance(content, list)
        rules = [rule.model_dump() for rule in content]
        for tensor in (rule[role] for rule in rules for role in ROLES):
            if tensor is not None and tensor["format"] == PLACEHOLDER:
                tensor["format"] = fmt
        return [Rule.model_validate(rule) for rule in rules]

    def _override(self, selector: str) -> Override:
        """Return the override of ``selector``. Its selector and settings are checked even if it selects no cell."""
        place = f"overrides.{selector}"
        params = self.params
        if selector not in {**params.optimizers, **params.models} and not self.names.has(selector):
            self._require_key(selector)
        override = validated(Override, params.overrides[selector], f"{self.source}: {place}")
        if override.recipe is not None:
            require_name(override.recipe, params.recipes, self.source, f"{place}.recipe", "recipes")
        arms = [name for name in (selector, *selector.split("-")) if name in params.optimizers]
        for section, schema, bases in (
            ("model", CellModel, [self.models[selector]] if selector in self.models else self.models.values()),
            ("arm", Arm, [params.optimizers[name] for name in arms or params.grid.optimizers]),
            ("train", Train, [params.train]),
            ("monitor", MonitorSettings, [params.monitor]),
        ):
            for base in bases:
                content = merged(base.model_dump(), getattr(override, section))
                validated(schema, content, f"{self.source}: {place}.{section}")
        return override

    def _require_key(self, selector: str) -> None:
        """Raise :class:`UserError` unless ``selector`` is a cell's key with valid parts.

        The parts are entry-arm-seed-lr_scale or entry-arm-seed-lr_scale-model.
        """
        params = self.params
        ends = [name for name in params.models if selector.count("-") > 3 and selector.endswith(f"-{name}")]
        model = max(ends, key=len, default=None)
        parts = selector.removesuffix(f"-{model}").split("-", 3)
        named = len(parts) == 4 and self.names.has(parts[0]) and parts[1] in params.optimizers
        if named and parts[2].isdigit() and _is_number(parts[3]):
            # DVC makes the key from the grid's values as they are written; 1.0 for 1 would select nothing.
            number = float(parts[3])
            same = [value for value in params.grid.lr_scales if value == number]
            spellings = same or [number, *([int(number)] if number.is_integer() else [])]
            keys = [cell_key(parts[0], parts[1], int(parts[2]), value, model) for value in spellings]
            if selector not in keys:
                raise UserError(f"{self.source}: overrides: write {selector} as {keys[0]}")
            return
        grid = params.grid
        cells = itertools.product(grid.formats, grid.optimizers, grid.seeds, grid.lr_scales, (*grid.models, None))
        names = [*grid.formats, *params.recipes, *params.optimizers, *params.models]
        known = [*names, *itertools.starmap(cell_key, cells)]
        hint = did_you_mean(selector, known, f", such as {known[-1]}")
        raise UserError(f"{self.source}: overrides: {selector!r} is no format, recipe, arm, model or cell{hint}")


def _is_number(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
