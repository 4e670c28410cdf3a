"""What a name in the grid stands for.

An entry of ``grid.formats`` is a recipe (``bf16``), a format for the recipe of ``grid.recipe`` (``E3M4``), or both
(``virtual.E3M4``). A name means one thing only, and every mistake in one is a sentence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from altgrad.common.errors import UserError, did_you_mean
from altgrad.config.recipe import ROLES
from altgrad.config.schema import CustomFormat, Params
from altgrad.config.switches import ChangingRecipe
from altgrad.formats import Format, get_format

PLACEHOLDER = "FORMAT"  # in a recipe, stands for the format of the grid's entry
JOINT = "."  # of a recipe and its format in an entry


def training_format(name: str, custom: CustomFormat | None = None) -> Format:
    """Return the format called ``name``, or the user's own that ``custom`` defines.

    Raises ``ValueError`` for an unknown name, an impossible definition, and a format that training cannot compute.
    """
    found = get_format(name) if custom is None else Format(name, **custom.model_dump())
    if not found.signed:
        raise ValueError(f"{name} is unsigned, and weights and gradients have a sign")
    if not found.rounds_in_float32:
        raise ValueError(
            f"{name} spans more than training can round in float32; up to 7 exponent bits with the usual bias fit"
        )
    return found


class Entries:
    """The entries that one :class:`Params` can have; ``source`` is what messages call the file.

    Raises :class:`UserError` where a name could mean two things, or a format of the user's own is none.
    """

    def __init__(self, params: Params, source: object) -> None:
        self.params = params
        self.source = source
        self._require_distinct_names()
        for name, recipe in params.recipes.items():
            for setting, entry in recipe.names.items() if isinstance(recipe, ChangingRecipe) else ():
                self._require_rules(entry, f"recipes.{name}.{setting}")

    def parts(self, entry: str) -> tuple[str, str | None]:
        """Return the recipe that ``entry`` stands for, and the format in it: none where the recipe names its own."""
        if entry in self.params.recipes:
            return entry, None
        recipe, joint, fmt = entry.partition(JOINT)
        return (recipe, fmt) if joint else (self.params.grid.recipe, entry)

    def require(self, entry: str, setting: str) -> None:
        if entry in self.params.recipes:
            return
        if JOINT in entry:
            self._require_joint_entry(entry, setting)
            return
        try:
            self.describe(entry, setting)
        except UserError as error:
            hint = did_you_mean(entry, self.params.recipes)
            also = f"; as a recipe, {hint.removeprefix('; ')}" if "did you mean" in hint else ""
            raise UserError(f"{error}{also}") from None

    def has(self, name: str) -> bool:
        if name in self.params.recipes:
            return not self.is_template(name)
        try:
            self.require(name, "")
        except UserError:
            return False
        return True

    def describe(self, name: str, setting: str) -> dict[str, Any]:
        """Return the fields of the format called ``name``; raises at ``setting`` for one that cannot be trained."""
        try:
            return dataclasses.asdict(training_format(name, self.params.formats.get(name)))
        except ValueError as error:
            raise UserError(f"{self.source}: {setting}: {error}") from None

    def _require_joint_entry(self, entry: str, setting: str) -> None:
        """Raise unless ``entry`` is a recipe that waits for a format, and a format."""
        recipe, _, fmt = entry.partition(JOINT)
        where = f"{self.source}: {setting}: {entry}"
        if recipe not in self.params.recipes:
            swapped = f"; did you mean {fmt}{JOINT}{recipe}?" if fmt in self.params.recipes else None
            hint = swapped or did_you_mean(recipe, self.params.recipes)
            raise UserError(f"{where}: {recipe!r} is not in recipes{hint}")
        if not self.is_template(recipe):
            raise UserError(
                f"{where}: recipes.{recipe} does not use {PLACEHOLDER}, so it takes no format; write {recipe} alone"
            )
        if fmt in self.params.recipes:
            raise UserError(f"{where}: {fmt} is a recipe, and {recipe} takes a format; write {recipe}{JOINT}E4M3, say")
        self.describe(fmt, f"{setting}: {entry}")

    def is_template(self, recipe: str) -> bool:
        """Return whether a recipe waits for a format, and so cannot be a grid entry itself."""
        found = self.params.recipes[recipe]
        if isinstance(found, ChangingRecipe):
            return any(name in self.params.recipes and self.is_template(name) for name in found.names.values())
        specs = [getattr(rule, role) for rule in found for role in ROLES]
        return any(spec is not None and spec.format == PLACEHOLDER for spec in specs)

    def _require_rules(self, entry: str, setting: str) -> None:
        """Raise unless ``entry``, which a recipe names at ``setting``, is one whose recipe is a list of rules."""
        own = self.parts(entry)[0]
        if isinstance(self.params.recipes.get(own), ChangingRecipe):
            raise UserError(f"{self.source}: {setting}: recipes.{own} changes during a run itself; name one of its own")
        self.require(entry, setting)

    def _require_distinct_names(self) -> None:
        """Raise unless a name in the grid can mean one thing only, and every format of one's own is sound."""
        params = self.params
        for name in params.formats:
            self.describe(name, f"formats.{name}")
            if name in params.recipes or name == PLACEHOLDER or self._is_known_format(name):
                raise UserError(f"{self.source}: formats.{name}: the name is taken; choose another")
        for name in params.recipes:
            if name in params.optimizers or self._is_known_format(name):
                raise UserError(f"{self.source}: recipes.{name}: the name is taken; choose another")
        for section in ("formats", "recipes"):
            for name in getattr(params, section):
                if JOINT in name:
                    raise UserError(
                        f"{self.source}: {section}.{name}: {JOINT!r} joins a recipe and its format in grid.formats; "
                        "choose a name without it"
                    )
        for name in params.optimizers:
            if self.has(name):
                raise UserError(f"{self.source}: optimizers.{name}: the name is taken; choose another")

    def _is_known_format(self, name: str) -> bool:
        try:
            training_format(name)
        except ValueError:
            return False
        return True
