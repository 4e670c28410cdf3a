"""Presets: the models, corpora, arms and recipes that params.yaml may name without declaring them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from altgrad.common.files import read_yaml

FILE = Path(__file__).with_name("presets.yaml")
SECTIONS = ("optimizers", "recipes", "models", "corpora")
#: An entry with one of these settings says what it is, so that no preset of its name shows through.
WHOLE = {"base", "source", "from"}


@cache
def presets() -> dict[str, Any]:
    """Return ``presets.yaml``: by section and name, settings as in params.yaml; ``renamed`` has arms' old names."""
    return read_yaml(FILE)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``: mappings are merged, everything else replaces."""
    both = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def with_presets(params: dict[str, Any]) -> dict[str, Any]:
    """Return params.yaml's content with the presets in its sections, below its own entries.

    An entry of a preset's name changes the settings that it has; one that says what it is (`WHOLE`) replaces the
    preset. A section that is no mapping stays as it is, for the schema to refuse.
    """
    found = dict(params)
    for section in SECTIONS:
        own = params.get(section) or {}
        if isinstance(own, dict):
            whole = {name: its for name, its in own.items() if isinstance(its, dict) and WHOLE & set(its)}
            found[section] = merged(presets()[section], own) | whole
    return found


def refuse_old_names(params: dict[str, Any]) -> None:
    """Raise ``ValueError`` with the new name where params.yaml calls an arm as in an earlier version."""
    grid = params.get("grid")
    arms = grid.get("optimizers") if isinstance(grid, dict) else None
    for place, names in (
        ("grid.optimizers", arms), ("optimizers", params.get("optimizers")), ("overrides", params.get("overrides")),
    ):  # fmt: skip
        for name in filter(lambda name: isinstance(name, str), names if isinstance(names, list | dict) else ()):
            for part in name.split("-"):
                if new := presets()["renamed"].get(part):
                    raise ValueError(f"{place}: {part} is now called {new}")
