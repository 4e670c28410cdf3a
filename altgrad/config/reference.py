"""The settings reference: a page of Markdown per section of params.yaml, made from the declarations themselves."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from altgrad.config.models import Lora, Model, ModelFrom
from altgrad.config.recipe import Rule
from altgrad.config.resolve import Override
from altgrad.config.schema import CORPORA, Arm, Budget, CustomFormat, Diagnose, Grid, Monitor, Params, Tokenizer, Train
from altgrad.config.section import as_format
from altgrad.config.switches import ChangingRecipe
from altgrad.config.tasks import Classify, Language

FOLDER = Path(__file__).with_name("settings")
COMMAND = "python -m altgrad.config --reference"
LIMITS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


class Page(NamedTuple):
    """A page: its name, what an entry of the section is called, and the declarations that it shows."""

    name: str
    entries: str
    sections: tuple[type[BaseModel], ...]


PAGES = (
    Page("params", "The top of the file", (Params, Lora)),
    Page("tasks", "A section for each task", (Language, Classify)),
    Page("corpora", "An entry is a corpus, by its `source`", CORPORA),
    Page("tokenizer", "The section", (Tokenizer,)),
    Page("models", "An entry is a size of model, or weights to start from", (Model, ModelFrom)),
    Page("grid", "The section", (Grid,)),
    Page("train", "The section", (Train,)),
    Page("monitor", "The section", (Monitor,)),
    Page("diagnose", "The section", (Diagnose,)),
    Page("budget", "The section", (Budget,)),
    Page("optimizers", "An entry is an arm", (Arm,)),
    Page("recipes", "An entry is a list of rules, or recipes that a run goes through", (Rule, ChangingRecipe)),
    Page("formats", "An entry is a format of your own", (CustomFormat,)),
    Page("overrides", "An entry is chosen by a grid entry, an arm or a cell's key", (Override,)),
)


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    return {f"{page.name}.md": _page(page) for page in PAGES}


def write(folder: Path) -> None:
    """Write all pages to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def settings(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the name and the declaration of each setting, those without a default first."""
    fields = section.model_fields.items()
    yield from sorted(fields, key=lambda item: not item[1].is_required())


def _page(page: Page) -> str:
    shown: list[type[BaseModel]] = []
    left = list(page.sections)
    while left:  # a section's own sections stand below it
        section = left.pop(0)
        if section in shown:
            continue
        shown.append(section)
        if page.name != "params":
            left += [kind for _, field in settings(section) for kind in _sections_in(field.annotation)]
    made_by = f"This page is made of the declarations in `altgrad/config` by `{COMMAND}`."
    parts = [f"# `{page.name}`" if page.name != "params" else "# params.yaml", f"{page.entries}.\n\n{made_by}"]
    for section in shown:
        if len(shown) > 1:
            parts.append(f"## {section.__name__}")
        parts += [inspect.cleandoc(section.__doc__ or "").replace("``", "`"), _table(section)]
    return "\n\n".join(parts) + "\n"


def _table(section: type[BaseModel]) -> str:
    rows = ["| setting | value | default | what it is |", "|---|---|---|---|"]
    for name, field in settings(section):
        values = (f"`{name}`", _kind(field.annotation, field.metadata), _default(field), field.description or "")
        rows.append(f"| {' | '.join(value.replace('|', chr(92) + '|') for value in values)} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "–"
    if field.default_factory is not None:
        return "the base's"
    value = field.default
    if isinstance(value, BaseModel):
        return "its own defaults"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _kind(kind: Any, metadata: list[Any]) -> str:
    """Return the values that a type takes, in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kind(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else _kind(a, metadata) for a in arguments)
    if origin in (list, tuple) and arguments:
        return (
            f"list of {_kind(arguments[0], [])}" if origin is list else f"{len(arguments)} x {_kind(arguments[0], [])}"
        )
    if origin is dict:
        return "settings, by name" if _holds_anything(arguments[1]) else f"{_kind(arguments[1], [])}, by name"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"`{kind.__name__}`"
    if any(getattr(part, "func", None) is as_format for part in metadata):
        return "a format's name"
    words = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}.get(kind, "number")
    limits = [(template, getattr(part, name, None)) for part in _limits(metadata) for name, template in LIMITS.items()]
    return ", ".join([words, *(template.format(_number(limit)) for template, limit in limits if limit is not None)])


def _holds_anything(kind: Any) -> bool:
    return kind is Any or (get_origin(kind) is dict and _holds_anything(get_args(kind)[1]))


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) else f"{value:g}"


def _limits(metadata: list[Any]) -> list[Any]:
    return [part for entry in metadata for part in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _sections_in(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for argument in get_args(kind) for section in _sections_in(argument)]
