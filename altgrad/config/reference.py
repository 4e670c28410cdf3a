"""The settings reference: a page of Markdown per section of params.yaml, made from the JSON schema of the settings."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from altgrad.config.resolve import Override
from altgrad.config.schema import Params

FOLDER = Path(__file__).with_name("settings")
COMMAND = "python -m altgrad.config --reference"
MADE_BY = f"This page is made of the declarations in `altgrad/config` by `{COMMAND}`."
WORDS = {"integer": "whole number", "boolean": "`true` or `false`", "string": "text", "null": "none"}
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


@cache
def sections() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each section of settings, by the name of its class."""
    _, schema = models_json_schema([(Params, "validation"), (Override, "validation")], ref_template="{model}")
    return dict(schema["$defs"])


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name: the top of the file, then each setting that is a section."""
    found = {"params.md": f"# params.yaml\n\n{MADE_BY}\n\n{_section('Params')}\n"}
    for name, spec in sections()["Params"]["properties"].items():
        shown = ["Override"] if name == "overrides" else _named(spec)
        for section in shown:  # those that a section names stand below it
            shown += [below for below in _named(sections()[section]) if below not in shown]
        if shown:
            what = f"{_kind(spec)}: {spec['description']}."
            parts = [f"# `{name}`", what[:1].upper() + what[1:], MADE_BY]
            parts += [f"## {section}\n\n{_section(section)}" for section in shown]
            found[f"{name}.md"] = "\n\n".join(parts) + "\n"
    return found


def write(folder: Path) -> None:
    """Write all pages to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


def _named(spec: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(re.findall(r'"\$ref": "(\w+)"', json.dumps(spec))))


def _section(name: str) -> str:
    """Return what a section is and the table of its settings, those without a default first."""
    section = sections()[name]
    rows = ["| setting | value | default | what it is |", "|---|---|---|---|"]
    needed = section.get("required", [])
    for setting, spec in sorted(section["properties"].items(), key=lambda item: item[0] not in needed):
        default = "–" if setting in needed else _default(spec)
        values = (f"`{setting}`", _kind(spec), default, spec["description"])
        rows.append(f"| {' | '.join(value.replace('|', chr(92) + '|') for value in values)} |")
    return "\n\n".join([section["description"].replace("``", "`"), "\n".join(rows)])


def _default(spec: dict[str, Any]) -> str:
    if "default" not in spec:
        return "the base's"
    value = spec["default"]
    if "$ref" in spec or value is None:
        return "none" if value is None else "its own defaults"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _kind(spec: Any) -> str:
    """Return the values that a part of the schema lets through, in words."""
    if alternatives := spec.get("anyOf", spec.get("oneOf")):
        return " or ".join(map(_kind, alternatives))
    if words := spec.get("enum", [spec[name] for name in ("const", "$ref") if name in spec]):
        return " or ".join(f"`{word}`" for word in words)
    if inner := spec.get("additionalProperties"):
        anything = inner is True or "additionalProperties" in inner
        return f"{'settings' if anything else _kind(inner)}, by name"
    if "prefixItems" in spec:
        return f"{len(spec['prefixItems'])} x {_kind(spec['prefixItems'][0])}"
    if "items" in spec:
        return f"list of {_kind(spec['items'])}"
    limits = [f"{words} {spec[limit]:.20g}" for limit, words in LIMITS.items() if limit in spec]
    return ", ".join([spec.get("format") or WORDS.get(spec["type"], spec["type"]), *limits])
