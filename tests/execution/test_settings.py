"""Laws of settings in params.yaml. Oracles: the parsed file, and what DVC's own command makes of it, byte for byte."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.hydra import apply_overrides

from altgrad.common.files import read_yaml
from altgrad.config import UserError
from altgrad.execution import settings
from altgrad.execution.__main__ import main
from altgrad.execution.settings import change_params
from stages import grid
from tests.pipeline.conftest import PROJECT

PARAMS = PROJECT / "params.yaml"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(PARAMS, tmp_path))


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stage `grid` check a file in this process, which has loaded what that takes."""
    monkeypatch.setattr(settings, "_check", lambda path, name: grid.main([str(path)]))


@pytest.fixture(scope="module")
def unchecked(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that writes settings into a file of such text, whatever they mean.

    It returns the text then, and the content.
    """
    file = tmp_path_factory.mktemp("unchecked") / "params.yaml"

    def change(*given: str, text: str) -> tuple[str, dict[str, Any]]:
        file.write_bytes(text.encode())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(settings, "_check", lambda path, name: None)
            change_params(file, list(given))
        return file.read_bytes().decode(), read_yaml(file)

    return change


@pytest.mark.parametrize(
    "given",
    [
        ["grid.formats=[bf16,E5M2]"], ["train.clip=2e-3"], ["+monitor.groups=[tensors]"], ["train.steps=5"],
        ["+overrides.E5M2.train.clip=0.5"], ["++optimizers.muon.lr=1e-5"], ["start=data/weights/a"],
        ["tracking=[mlflow]", "grid.seeds=[7]"], ["grid.lr_scales=[1.0]"], ["model={from: data/weights/a}"],
        ['++recipes.one=[{layers:"*",weight:FORMAT,grad:{format:E5M2}}]'],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_setting_is_written_as_dvc_writes_it_and_comments_stay(unchecked, given: list[str], path: Path):
    apply_overrides(path, [])
    assert path.read_bytes() == PARAMS.read_bytes(), "a fixed point of DVC's writer"
    apply_overrides(path, given)
    text, _ = unchecked(*given, text=PARAMS.read_text())
    assert text == path.read_text()
    comments = [line.partition("# ")[2] for line in PARAMS.read_text().splitlines() if "# " in line]
    assert [line.partition("# ")[2] for line in text.splitlines() if "# " in line] == comments
    values = {line.partition(" #")[0].strip() for line in set(text.splitlines()) ^ set(PARAMS.read_text().splitlines())}
    assert len(values) <= 16, "its own lines alone"


@pytest.mark.usefixtures("checked_here")
def test_several_settings_may_stand_in_one_text_and_what_is_so_already_is_not_written(path: Path):
    stamp = path.stat().st_mtime_ns, path.stat().st_ino
    change_params(path, [" train.steps=200  train.final_lr=1e-1\n formats={} "])
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == stamp
    change_params(path, ['corpora.local.path="my own texts" grid.lr_scales=[1.0]'])
    assert read_yaml(path)["corpora"]["local"]["path"] == "my own texts"
    assert "- 1.0\n" in path.read_text(), "which makes another key than 1"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model=huge", "model: 'huge' is not in models"),
        ("grid.formats=[E3M4x]", "unknown format 'E3M4x'; did you mean E3M4"),
        ("grid.optimizers=[adamv]", "did you mean madam or adamw"),
        ("grid.baseline=E9M9", "grid.baseline"),
        ("grid.sedes=[0]", "grid has no 'sedes', which a + before the name would add; did you mean seeds or models?"),
        ("+grid.sedes=[0]", "unknown setting 'sedes'; did you mean seeds or models?"),
        ("trian.clip=1", "the file has no 'trian', which a + before the name would add; did you mean train or"),
        ("+train.clip=1", "leave out the +"),
        ("model.width=8", "model is a value and has no settings"),
        ("grid.seeds=[0", "expected NAME=VALUE"),
        ("seeds", "expected NAME=VALUE"),
        ("grid.formats=[E3M4],[E4M3]", "one setting has one value"),
        ("~train.clip", "one setting has one value"),
        ("train.final_lr=2", "less than or equal to 1"),
        ("train.clip=nan", "train.clip: input should be less than or equal to"),
        ("tokenizer.vocab_size=7", "tokenizer.vocab_size: input should be greater than or equal to 257, not 7"),
        ("overrides={E9: {train: {clip: 0.5}}}", "'E9' is no format, recipe, arm, model or cell"),
        ("overrides={E5M2: {train: {clop: 0.5}}}", "did you mean clip"),
        ("+formats.E4M3={exponent_bits:4,mantissa_bits:3}", "the name is taken"),
        ("formats.mine={exponent_bits:4,mantissa_bits:3}", "formats has no 'mine', which a + before the name would"),
        ("+recipes.uniform=[{layers:block.*,weight:FORMAT}]", "matches no layer"),
        ("+models.pico.heads=3", "not divisible"),
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
        ("a:   # empty\nb: 1\n", "+a.c=2", {"a": {"c": 2}, "b": 1}),
        ("a: {b: 1  # one\n  }\n", "+a.c=2", {"a": {"b": 1, "c": 2}}),
        ("a:\r\n  b: 1  # é\r\nc: 2", "+a.d=3", {"a": {"b": 1, "d": 3}, "c": 2}),
        ("a:\n- b\n- c  # last\n\n# of d\nd: 1\n", "a=[1]", {"a": [1], "d": 1}),
        ("a: &x {b: 1}\nc: *x\n", "a=2", {"a": 2, "c": {"b": 1}}),
        ("a: &x {b: 1}\nc: *x\n", "c.b=2", None),
    ],
)
def test_other_ways_to_write_a_file_are_understood_or_left_alone(unchecked, text: str, setting: str, after):
    if after is None:
        with pytest.raises(UserError, match=r"is as it was\)$"):
            unchecked(setting, text=text)
    else:
        assert unchecked(setting, text=text)[1] == after
