"""Whatever stands in params.yaml, it resolves or is refused in sentences that name the place.

Oracle: a refusal is `UserError`, each of its lines begins with the file and a setting of the schema, and is short. A
mutation replaces, drops, doubles, nests or renames nodes of the shipped file, each file by a seed of its own;
``python -m tests.config.test_fuzz 2000`` tries as many.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import random
import re
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from altgrad.common.files import read_yaml
from altgrad.config import Params, Resolver, UserError, load_params, params
from altgrad.config.params import with_presets

SHIPPED = with_presets(read_yaml(Path(__file__).parents[2] / "params.yaml"))
SHIPPED["grid"] |= {"formats": ["bf16", "E4M3", "virtual.E3M4"], "optimizers": ["adamw", "spacing_scaled"]}
SHIPPED["grid"]["seeds"] = [0]
SHIPPED["formats"] = {"mine": {"exponent_bits": 4, "mantissa_bits": 3, "bias": 9}}
SHIPPED["overrides"] = {
    "E4M3": {"train": {"clip": 0.5, "divergence": {"window": 60}}, "recipe": "uniform_row"},
    "adamw": {"arm": {"lr": 0.01}, "monitor": {"every": 20}}, "E4M3-adamw-0-1": {"model": {"dropout": 0.1}},
}  # fmt: skip
#: One of every kind that YAML reads, and values at the edges of a kind.
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**63, -(10**40), 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"),
    -float("inf"), "", " ", "none", "null", "E4M3", "FORMAT", "bf16", "uniform", "MXFP8", "1", "1e5", ".nan", "yes",
    "ü", "日本", "🙂", "a\nb", "\x07", "x" * 300, 1 << 20_000, "virtual.E3M4", "a-b", "../x", "%s {0}", "a-b-0-1",
    "E4M3-adamw-0-1", "E99M99", "E-1M3", "UE4M4", "dynamic8", datetime.date(2026, 2, 28), b"\xff\x00",
    datetime.datetime.fromisoformat("2026-02-28T01:02"),
    {"a"}, [], [None], [[]], [1, "a"], ["E4M3"], [0.9, 0.95], [{}], {}, {"a": 1}, {"format": "E4M3"},
    {"format": {"format": "E4M3"}}, {"source": "licences"}, {"from": "x"}, {1: 2}, {None: None}, {True: 1},
    {(1, 2): 3}, {"": {}}, {0.5: {}}, {datetime.date(2026, 1, 1): 1}, [[[[[[]]]]]], {"a": {"b": {"c": {"d": []}}}},
]  # fmt: skip
KEYS: list[Any] = ["", " ", "a", "E4M3", "a\nb", "ü", "x" * 300, "a.b", "a-b", 1, 0.5, None, True, b"a", (1, 2)]
TEXT = """\
grid: {formats: [bf16, mine], optimizers: [adamw], seeds: [0], lr_scales: [1.0e-1], recipe: uniform, baseline: bf16}
corpus: mine
model: pico
optimizers: &arms
  adamw: {base: adamw, lr: 3.0e-3, plain_lr: 2.4e-2, betas: [0.9, 0.95]}
recipes:
  bf16: []
  uniform: [{layers: "*", weight: {format: FORMAT, scaling: delayed}, grad: E5M2}]
formats:
  mine: {exponent_bits: 4, mantissa_bits: 3, bias: ~}
models: {pico: {layers: 2, width: 64, heads: 2, context: 64}}
corpora:
  mine: {source: local, path: 'data/corpus'}
"""
TYPED = [
    *"&*!|>%@`?:-#,[]{}'\"\t\n\0\x85\ufeffü💥", "&a ", "*a ", "*arms", "<<: *arms\n", "!!binary ", "!!set ", "!!float ",
    "!!python/object:os.system ", "!mine ", "---\n", "...\n", "%YAML 1.1\n", "2026-02-30 ", "1:30:00 ",
    "0x" + "F" * 5000, "9" * 5000, "[" * 2000, "{a: " * 300, "? ", "- ", ": ", "~", "=", "0o17 ", "1_000 ", ".nan",
    "-.inf", "\r\n", "'", "  ",
]  # fmt: skip


def nodes(content: Any, path: tuple[Any, ...] = (), above: tuple[int, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all nodes below ``content``, each of those inside of themselves once."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    if id(content) in above:
        return []
    above = (*above, id(content))
    return [found for key, value in items for found in [(*path, key), *nodes(value, (*path, key), above)]]


def mutated(seed: int) -> dict[Any, Any]:
    """Return the shipped settings after one to three mutations."""
    draw = random.Random(seed)
    content = copy.deepcopy(SHIPPED)
    content["task"] = draw.choice(["language", "classify"])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        paths = nodes(content)
        if not paths:
            break
        section = draw.choice([path for path in paths if len(path) == 1])[0]  # a small one as often as a large one
        mutate(content, draw.choice([path for path in paths if path[0] == section]), draw)
    return content


def mutate(content: Any, path: tuple[Any, ...], draw: random.Random) -> None:
    parent, key = content, path[-1]
    for part in path[:-1]:
        parent = parent[part]
    value, other = parent[key], content
    for part in draw.choice(nodes(content)):
        other = other[part]
    kind = draw.choice(["value", "value", "value", "other", "nest", "drop", "rename", "add", "shared"])
    if kind == "value":
        parent[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == "other":
        parent[key] = copy.deepcopy(other)
    elif kind == "nest":
        parent[key] = {key: value} if draw.random() < 0.5 else [value, copy.deepcopy(value)]
    elif kind == "drop":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw.choice([draw.choice(KEYS), f"{key}x", str(key).upper()])] = parent.pop(key)
    elif kind == "add":
        if isinstance(value, dict):
            value[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
        elif isinstance(value, list):
            value.append(copy.deepcopy(draw.choice([*VALUES, *value])))
    elif isinstance(value, dict | list) and draw.random() < 0.2:  # an anchor inside of itself
        if isinstance(value, dict):
            value[next(iter(value), "a")] = value
        else:
            value.append(value)
    else:  # an anchor elsewhere
        parent[key] = other


def mistyped(seed: int) -> str:
    """Return a short file with one to three slips of the keyboard."""
    draw, text = random.Random(seed), TEXT
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        start = draw.randrange(len(text))
        typed = draw.choice([draw.choice(TYPED), draw.choice(TEXT), ""])
        text = text[:start] + typed + text[start + draw.choice([0, 1, 1, 2, 20]) :]
    return text


def outcome(content: Any) -> str | None:
    """Return what is said of settings, ``None`` if they resolve; other errors than `UserError` are let through."""
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(content, str):
            patch.setattr(Path, "read_text", lambda *_, **__: content)
        else:
            patch.setattr(params, "read_yaml", lambda _: content)
        try:
            resolver = Resolver(load_params(Path("params.yaml")))
            for cell in resolver.cells():
                cell.to_json()
            resolver.idle()
            resolver.selected()
        except UserError as error:
            return str(error)
    return None


def faults(said: str) -> list[str]:
    """Return the lines of a refusal that are no sentence with a place."""
    lines = said.split("\n       ")
    unread = r", line \d+, column \d+ is not| is not| must hold"
    place = re.compile(rf"params\.yaml({unread}|: (cell |unknown setting |({'|'.join(Params.model_fields)})\b))")
    length = {line: len(re.sub(r"(.)\1{99,}", r"\1", line)) for line in lines}  # of what a file repeats, once
    return [line for line in lines if not place.match(line) or length[line] > 1000]


@pytest.mark.parametrize("part", range(4))
def test_mutated_settings_resolve_or_are_refused_in_a_sentence(part):
    for seed in range(part * 50, part * 50 + 50):
        for made in (mutated, mistyped):
            said = outcome(made(seed))
            assert said is None or faults(said) == [], f"{made.__name__} {seed}"


FORMAT, STEPS, START = "weight: {format: FORMAT", "plain_lr: 2.4e-2", "corpus: mine"


@pytest.mark.parametrize(("old", "new", "words"), [
    (FORMAT, "weight: {format: {format: E4M3}", r"uniform\[0\].weight.format: expected a format's name, not {'format'"),
    (FORMAT, "weight: {format: [E4M3]", r"uniform\[0\].weight.format: expected a format's name, not \['E4M3'\]"),
    (STEPS, "plain_lr: !!float ''", "is not valid YAML: a value does not fit the tag in front of it"),
    (START, "corpus: " + "[" * 2000, "is not valid YAML: its brackets or anchors are nested without an end"),
    (START, f"corpus: mine\nmonitor: {{every: 0x{'F' * 5000}}}", "monitor.every is a whole number beyond 2"),
    (START, f"corpus: mine\nstart: {'x' * 300}", "start: x+: File name too long"),
    ("models: {pico: {layers: 2, width: 64, heads: 2", "models: {pico: {from: x", "params.yaml: model: from: x has no"),
    (START, f"corpus: {list(range(99))}", r"corpus: .*, not \[0, 1, .{93}\.\.\.$"),
])  # fmt: skip
def test_what_mutations_have_found_is_said_at_its_place(old, new, words):
    said = outcome(TEXT.replace(old, new, 1))
    assert said is not None and re.search(words, said), said


def main(count: int) -> None:
    found: Counter[str] = Counter()
    for made, seed in itertools.product((mutated, mistyped), range(count)):
        try:
            said = outcome(made(seed))
            wrong = faults(said) if said else []
            what = "resolved" if said is None else f"no sentence: {wrong[0][:200]!r} ({seed})" if wrong else "refused"
        except Exception as error:  # noqa: BLE001
            what = f"{type(error).__name__} at {traceback.extract_tb(error.__traceback__)[-1]} ({seed})"
        found[f"{made.__name__}: {what}"] += 1
    for what, times in found.most_common():
        print(times, what)


if __name__ == "__main__":
    main(int(sys.argv[1]))
