"""Check params.yaml against the schema of its settings, or print its presets or a reference of all settings.

The check loads neither the corpus nor the model. Stage `grid` makes the checks that need them.
"""

import argparse
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from altgrad.common.console import called
from altgrad.common.errors import run_stage
from altgrad.config.params import PRESETS, Params, load_params
from altgrad.config.recipe import PUBLISHED
from altgrad.config.resolve import Override

FOLDER = Path(__file__).with_name("settings")
COMMAND = "python -m altgrad.config --reference altgrad/config/settings"
MADE_BY = f"`{COMMAND}` writes this page."
WORDS = {"integer": "whole number", "boolean": "`true` or `false`", "string": "text", "null": "none"}
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


@cache
def sections() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each section of settings, by the name of its class."""
    _, schema = models_json_schema([(Params, "validation"), (Override, "validation")], ref_template="{model}")
    return dict(schema["$defs"])


def pages() -> dict[str, str]:
    """Return the Markdown pages of the settings reference by file name: ``params.md``, and one for each section."""
    found = {"params.md": f"# params.yaml\n\n{MADE_BY}\n\n{_section('Params')}\n"}
    for name, spec in sections()["Params"]["properties"].items():
        shown = ["Override"] if name == "overrides" else _named(spec)
        for section in shown:  # the loop also visits what it appends: sections that a section names
            shown += [below for below in _named(sections()[section]) if below not in shown]
        if shown:
            what = f"{_kind(spec)}: {spec['description']}."
            parts = [f"# `{name}`", what[:1].upper() + what[1:], MADE_BY]
            parts += [f"## {section}\n\n{_section(section)}" for section in shown]
            found[f"{name}.md"] = "\n\n".join(parts) + "\n"
    return found


def _named(spec: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(re.findall(r'"\$ref": "(\w+)"', json.dumps(spec))))


def _section(name: str) -> str:
    """Return a section's description and the table of its settings. Settings without a default come first."""
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
    """Return which values a part of the schema allows, such as ``"whole number, at least 1"``."""
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


def main(arguments: list[str]) -> None:
    """Run the command; raise :class:`UserError` for a mistake in params.yaml."""
    parser = argparse.ArgumentParser(prog=called("config"), description=__doc__)
    parser.add_argument("--presets", action="store_true", help="print the preset models, corpora, arms and recipes")
    parser.add_argument(
        "--reference", nargs="?", const="-", metavar="FOLDER",
        help="print the reference of all settings, or write its pages into FOLDER",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.presets:
        for file in (PRESETS, PUBLISHED):
            sys.stdout.write(file.read_text(encoding="utf-8"))
    elif options.reference is None:
        load_params()
    elif options.reference == "-":
        sys.stdout.write("\n".join(pages().values()))
    else:
        folder = Path(options.reference)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_stage(main)
