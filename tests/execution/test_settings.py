"""Laws of settings in params.yaml. Oracles: the parsed file, its lines by their indentation, and DVC's own command."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides
from hypothesis import example, given
from hypothesis import settings as options
from hypothesis import strategies as st
from ruamel.yaml import YAML

from altgrad.config import UserError, load_params
from altgrad.config.files import read_yaml
from altgrad.execution import settings
from altgrad.execution.__main__ import main
from altgrad.execution.settings import change_params
from stages import grid
from tests.pipeline.conftest import PROJECT

PARAMS = PROJECT / "params.yaml"
MINE = "mine: {exponent_bits: 4, mantissa_bits: 3}"

Path_ = tuple[str, ...]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(PARAMS, tmp_path))


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stage `grid` check a file in this process, which has loaded what that takes."""
    monkeypatch.setattr(settings, "_check", lambda path: grid.main([str(path)]))


@pytest.fixture(scope="module")
def unchecked(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that writes settings into a file of such text, whatever they mean.

    It returns the lines then, and the content.
    """
    file = tmp_path_factory.mktemp("unchecked") / "params.yaml"

    def change(*given: str, text: str) -> tuple[list[str], dict[str, Any]]:
        file.write_bytes(text.encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "_check", lambda path: None)
            change_params(file, list(given))
        return file.read_bytes().decode().split("\n"), read_yaml(file)

    return change


def paths(section: dict[str, Any], above: Path_ = ()) -> list[Path_]:
    """Return where something is, sections and values."""
    inner = [(*above, name) for name in section]
    return inner + [deeper for name in inner if isinstance(section[name[-1]], dict)
                    for deeper in paths(section[name[-1]], name)]  # fmt: skip


def holding(lines: list[str], path: Path_) -> tuple[int, int]:
    """Return the range of ``lines`` that ``path`` is written in, as far as each part of it has lines of its own."""
    start, end, indent = 0, len(lines), 0
    for part in path:
        first = next((i for i in range(start, end) if re.match(rf" {{{indent}}}{re.escape(part)}:", lines[i])), None)
        if first is None:
            break
        ends = (i for i in range(first + 1, end) if re.match(rf" {{0,{indent}}}[^ #]", lines[i]))
        start, end, indent = first, next(ends, end), indent + 2
    return start, end


def in_hydra(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {in_hydra(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_hydra, value)) + "]"
    return {None: "null", True: "true", False: "false"}.get(value, f'"{value}"') if isinstance(
        value, str | bool | None) else repr(value)  # fmt: skip


LINES = PARAMS.read_text().split("\n")
STARTS = [i for i, line in enumerate(LINES) if re.match(r"\w", line)]  # of sections
PARTS = ["\n".join(LINES[i:j]) for i, j in zip(STARTS, [*STARTS[2:], None, None], strict=True)]  # each and the next one
BEFORE = {text: YAML(typ="safe", pure=True).load(text) for text in PARTS}
PLACES = [(text, path) for text, content in BEFORE.items() for path in paths(content)]
IN_SECTIONS = [(text, path) for text, path in PLACES if isinstance(BEFORE[text][path[0]], dict)]
NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True).filter(lambda name: name not in ("null", "true", "false"))
TEXTS = st.text("abzE0147 ,:#{}[]'-+.*&!|>%@?~", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6,
)  # fmt: skip


@options(deadline=None, max_examples=25)
@given(st.sampled_from(PLACES), VALUES)
@example(next((text, path) for text, path in PLACES if path == ("corpus",)), {"a": ":0"})
@example(next((text, path) for text, path in PLACES if path == ("tasks", "language", "primary")), ":0")
def test_of_a_changed_setting_only_its_own_lines_differ(unchecked, place: tuple[str, Path_], value: Any):
    text, where = place
    lines, content = unchecked(f"{'.'.join(where)}={in_hydra(value)}", text=text)
    expected = section = copy.deepcopy(BEFORE[text])
    for part in where[:-1]:
        section = section[part]
    section[where[-1]] = value
    assert repr(content) == repr(expected), "the values, their types and their order"
    before = text.split("\n")
    start, end = holding(before, where)
    assert lines[:start] == before[:start] and lines[len(lines) - len(before) + end :] == before[end:]


@options(deadline=None, max_examples=50)
@given(st.sampled_from(IN_SECTIONS), NAMES, VALUES)
def test_an_added_setting_is_one_line_more_or_one_that_is_longer(unchecked, place: tuple[str, Path_], name, value: Any):
    text, where = place
    expected = section = copy.deepcopy(BEFORE[text])
    for part in where:
        section = section[part]
    if not isinstance(section, dict) or name in section:
        return
    section[name] = value
    lines, content = unchecked(f"+{'.'.join((*where, name))}={in_hydra(value)}", text=text)
    assert repr(content) == repr(expected)
    before = text.split("\n")
    start, end = holding(before, where)
    assert lines[:start] == before[:start] and lines[len(lines) - len(before) + end :] == before[end:]
    kept = (Counter(before) & Counter(lines)).total()
    assert (len(lines), kept) in {(len(before), len(before) - 1), (len(before) + 1, len(before))}


@pytest.mark.usefixtures("checked_here")
def test_comments_and_the_form_of_everything_else_stay(path: Path):
    change_params(path, [f"grid.formats=[bf16,mine] train.clip=2e-3 formats={{{MINE}}}", "+monitor.groups=[tensors]",
                         "+overrides.E5M2.train.clip=0.5", "++optimizers.adamw.match_rms=true"])  # fmt: skip
    lines = path.read_text().split("\n")
    added = {line for line in lines if line not in LINES}
    adamw = next(line for line in LINES if line.startswith("    {base: adamw"))
    formats, overrides = (next(line for line in LINES if line.startswith(name)) for name in ("formats", "overrides"))
    assert added == {
        "  formats: [bf16, mine]",
        "  clip: 0.002               # global gradient norm",
        "  groups: [tensors]",
        formats.replace("{}", f"{{{MINE}}}"),
        overrides.replace("{}", "{E5M2: {train: {clip: 0.5}}}"),
        adamw.replace("}", ", match_rms: true}"),
    }
    assert len(lines) == len(LINES) + 1


def test_settings_mean_what_they_mean_to_dvc(path: Path, tmp_path: Path):
    theirs = Path(shutil.copy(PARAMS, tmp_path / "theirs.yaml"))
    given = ["grid.seeds=[0,1,2]", "train.clip=2e-3", "+optimizers.adamw.match_rms=true", "model=micro",
             '++recipes.one=[{layers:"*",weight:FORMAT,grad:{format:E5M2}}]', "train.compile=off"]  # fmt: skip
    change_params(path, given)
    apply_overrides(theirs, given)
    assert read_yaml(path) == read_yaml(theirs)
    assert load_params(path).grid.seeds == [0, 1, 2]


@pytest.mark.usefixtures("checked_here")
def test_several_settings_may_stand_in_one_text_and_what_is_so_already_is_not_written(path: Path):
    stamp = path.stat().st_mtime_ns, path.stat().st_ino
    change_params(path, [" train.steps=200  optimizers.adamw.lr=3e-3\n formats={} "])
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == stamp
    change_params(path, ['corpora.local.path="my own texts" grid.lr_scales=[1.0]'])
    assert read_yaml(path)["corpora"]["local"]["path"] == "my own texts"
    assert "lr_scales: [1.0] " in path.read_text(), "which makes another key than 1"
    change_params(path, [f"grid.seeds={list(range(99))}"])
    assert len(path.read_text().split("\n")) == len(LINES), "however long a line gets"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model=huge", "model: 'huge' is not in models"),
        ("grid.formats=[E3M4x]", "unknown format 'E3M4x'; did you mean E3M4"),
        ("grid.optimizers=[adamv]", "did you mean madam or adamw"),
        ("grid.baseline=E9M9", "grid.baseline"),
        ("grid.sedes=[0]", "grid has no 'sedes', which a + before the name would add; did you mean seeds?"),
        ("+grid.sedes=[0]", "unknown setting 'sedes'; did you mean seeds?"),
        ("trian.clip=1", "the file has no 'trian', which a + before the name would add; did you mean train or"),
        ("+train.clip=1", "leave out the +"),
        ("model.width=8", "model is a value and has no settings"),
        ("grid.seeds=[0", "expected NAME=VALUE"),
        ("seeds", "expected NAME=VALUE"),
        ("grid.formats=[E3M4],[E4M3]", "one setting has one value"),
        ("~train.clip", "one setting has one value"),
        ("train.final_lr=2", "less than or equal to 1"),
        ("train.clip=nan", "train.clip: input should be less than or equal to"),
        ("tokenizer.vocab_size=7", "vocab_size 7 is outside"),
        ("overrides={E9: {train: {clip: 0.5}}}", "'E9' is no format, recipe, arm or cell"),
        ("overrides={E5M2: {train: {clop: 0.5}}}", "did you mean clip"),
        ("+formats.E4M3={exponent_bits:4,mantissa_bits:3}", "the name is taken"),
        ("formats.mine={exponent_bits:4,mantissa_bits:3}", "formats has no 'mine', which a + before the name would"),
        ("recipes.uniform=[{layers:block.*,weight:FORMAT}]", "matches no layer"),
        ("models.pico.heads=3", "not divisible"),
    ],
)
@pytest.mark.usefixtures("checked_here")
def test_a_refused_setting_changes_no_byte(setting: str, words: str, path: Path):
    with pytest.raises(UserError) as error:
        change_params(path, ["train.steps=5", setting])
    assert words in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("-S: ") and str(error.value).endswith(f"({path} is as it was)")
    assert path.read_bytes() == PARAMS.read_bytes() and os.listdir(path.parent) == [path.name]


def test_the_command_refuses_before_it_does_anything(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parent)
    with pytest.raises(UserError, match="-S: params.yaml: model: 'huge' is not in models"):
        main(["-S", "model=huge grid.seeds=[0]"])
    assert path.read_bytes() == PARAMS.read_bytes() and os.listdir() == [path.name]


@pytest.mark.usefixtures("checked_here")
def test_what_cannot_be_renamed_into_place_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch):
    def replace(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        change_params(path, ["train.steps=5"])
    assert path.read_bytes() == PARAMS.read_bytes() and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("text", "setting", "after"),
    [
        ("a:   # empty\nb: 1\n", "a.c=2", None),
        ("a:   # empty\nb: 1\n", "+a.c=2", "a: {c: 2}   # empty\nb: 1\n"),
        ("a:   # empty\nb: 1\n", "a=2", "a: 2   # empty\nb: 1\n"),
        ("a: {b: 1,}\n", "+a.c=2", "a: {b: 1, c: 2,}\n"),
        ("a: {b: 1  # one\n  }\n", "+a.c=2", "a: {b: 1, c: 2  # one\n  }\n"),
        ("a:\r\n  b: 1  # é\r\nc: 2", "+a.d=3", "a:\r\n  b: 1  # é\r\n  d: 3\r\nc: 2"),
        ("a:\n  b: 1", "+a.d=3", "a:\n  b: 1\n  d: 3"),
        ("a:\n- b\n- c  # last\n\n# of d\nd: 1\n", "a=[1]", "a:\n  [1]\n\n# of d\nd: 1\n"),
        ("a: |\n  b\n  c\n\nd: 1\n", "a=e", "a: e\n\nd: 1\n"),
        ("a:\n  b: |\n    x\n  # y\nd: 1\n", "+a.c=2", "a:\n  b: |\n    x\n  c: 2\n  # y\nd: 1\n"),
        ("a:\n  b:  # empty\nd: 1\n", "+a.c=2", "a:\n  b:  # empty\n  c: 2\nd: 1\n"),
        ('"a b": 1\n\'c-d\': 2\n', "c-d=3", '"a b": 1\n\'c-d\': 3\n'),
        ("a: &x {b: 1}\nc: *x\n", "a=2", None),
        ("a: &x {b: 1}\nc: *x\n", "c.b=2", None),
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}\n", "c.b=2", None),
    ],
)
def test_other_ways_to_write_a_file_are_kept_or_left_alone(unchecked, text: str, setting: str, after: str | None):
    if after is None:
        with pytest.raises(UserError, match=r"is as it was\)$"):
            unchecked(setting, text=text)
    else:
        assert unchecked(setting, text=text)[0] == after.split("\n")
