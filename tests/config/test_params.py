"""Laws of params.yaml: a mistake is one sentence that names the place and a way out; presets lie below its entries.

Oracles: YAML 1.2's specification (numbers such as 1e-5); the presets' settings, read apart from the schema, with the
changes written into them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from altgrad.common.files import read_yaml
from altgrad.config import Resolver, UserError, load_params
from altgrad.config.arms import Arm
from altgrad.config.params import PRESETS, SECTIONS, Params, validated
from altgrad.config.recipe import published_recipes

SHIPPED = Path(__file__).parents[2] / "params.yaml"
CONTENT = YAML(typ="safe", pure=True).load(PRESETS)


def read(**changes: Any) -> Params:
    return validated(Params, read_yaml(SHIPPED) | changes, "params.yaml")


def written_out() -> str:
    """Return the shipped params.yaml with all presets in it, and lists in brackets, as somebody might write them."""
    text = re.sub(r"\n +- (.+)", r"\0\1", SHIPPED.read_text())
    text = re.sub(r"^(  \w+:) +(#.*?)\0(.*)$", r"\1 [\3] \2", text, flags=re.MULTILINE).replace("\0", ", ")
    for section in re.split(r"\n(?=\w)", PRESETS.read_text())[1:]:
        name = section.partition(":")[0]
        text = re.sub(rf"^{name}:( {{}} .*)?\n", lambda _, section=section: section + "\n", text, flags=re.MULTILINE)
    return text


def params_with(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """Return a copy of the shipped params.yaml, all presets in it, with each (old, new) text replaced."""
    text = written_out()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return path


# --- presets -------------------------------------------------------------------------------------


def test_the_default_grid_is_made_of_presets_alone(tmp_path):
    """So params.yaml holds what somebody set, and no list of what could be. Writing presets out changes nothing."""
    own = read_yaml(SHIPPED)
    assert [own[name] for name in ("optimizers", "recipes", "models", "formats", "overrides")] == [{}, {}, {}, {}, {}]
    assert len(SHIPPED.read_text().splitlines()) <= 120
    assert len(list(Resolver(load_params(SHIPPED)).cells())) == 120
    assert load_params(params_with(tmp_path)) == load_params(SHIPPED)


def test_every_preset_is_what_it_says_and_can_be_trained():
    params = read()
    for name, settings in CONTENT["optimizers"].items():
        assert params.optimizers[name] == Arm.model_validate(settings)
    is_template = Resolver(params).names.is_template
    formats = [f"{name}.E4M3" if is_template(name) else name for name in (*CONTENT["recipes"], *published_recipes())]
    grid = read_yaml(SHIPPED)["grid"] | {"formats": formats, "optimizers": ["adamw"], "seeds": [0]}
    assert [cell.format for cell in Resolver(read(grid=grid)).cells()] == formats


@pytest.mark.parametrize(
    ("section", "name", "own", "expected"),
    [
        ("optimizers", "muon", {"lr": 0.006}, CONTENT["optimizers"]["muon"] | {"lr": 0.006}),
        ("optimizers", "adamw_coat", {"state": {"m": {"block": 64}}}, CONTENT["optimizers"]["adamw_coat"] | {"state": {
            "m": {"format": "E4M3", "block": 64, "expand": True}, "v": {"format": "E4M3", "block": 128, "expand": True},
        }}),
        ("optimizers", "muon", {"base": "sgd", "lr": 1.0}, {"base": "sgd", "lr": 1.0}),
        ("models", "micro", {"threads": 4}, CONTENT["models"]["micro"] | {"threads": 4}),
        ("corpora", "eurlex", {"source": "local", "path": "texts"}, {"source": "local", "path": "texts"}),
        ("recipes", "uniform", [{"layers": "*", "weight": "E4M3"}], [{"layers": "*", "weight": "E4M3"}]),
    ],
)  # fmt: skip
def test_an_own_entry_changes_what_it_says_of_a_preset_and_nothing_else(section, name, own, expected):
    """An entry that says its base, source or folder is whole: no setting of the preset shows through."""
    shipped = read_yaml(SHIPPED)[section]
    before, after, alone = read(), *(read(**{section: shipped | its}) for its in ({name: own}, {"alone": expected}))
    assert getattr(after, section)[name] == getattr(alone, section)["alone"] != getattr(before, section)[name]
    others = [
        {key: {k: v for k, v in getattr(params, key).items() if (key, k) != (section, name)} for key in SECTIONS}
        for params in (before, after)
    ]
    assert others[0] == others[1]


# --- mistakes ------------------------------------------------------------------------------------

SEEDS, ROWWISE, BLOCK, UNIFORM = "seeds: [0, 1, 2, 3, 4]", "torchao: rowwise}", "block, scale: E8M0", "weight: FORMAT"


@pytest.mark.parametrize(
    ("old", "new", "place", "cure"),
    [
        ("  steps: 200", "  steps: -3", "train.steps", "-3"),
        ("  steps: 200", "  steps: .nan", "train.steps", "finite"),
        ("  steps: 200", "  stepz: 200", "train", "did you mean steps"),
        ("  steps: 200", "  steps: true", "train", "steps must not be true"),
        ("  compile: auto", "  compile: true", "train", "compile must not be true; write auto or on or off"),
        ("compute: bf16 ", "compute: fp32 ", "params.yaml: train.compute: ", "'bf16' or 'float32', not 'fp32'"),
        ("lr: 3.0e-3", "lr: .inf", "optimizers.adamw.lr", "inf"),
        ("eps: 1.0e-8", "betas: [0.9, 1.5]", "optimizers.adamw.betas[1]", "less than 1"),
        ("eps: 1.0e-8", "decay: null", "optimizers.adamw", "decay and plain_decay need each other"),
        ("  adamw: {", "  adamw: E4M3\n  own: {", "optimizers.adamw", "settings, such as {name: value}, not 'E4M3'"),
        ("max_rungs: 8", "grid_scale: fixed", "optimizers.rung", "'grid_scale'; did you mean held_scale"),
        ("corpus: licences ", "corpus: licenses ", "corpus", "did you mean licences"),
        ("model: pico ", "model: picco ", "model", "did you mean pico"),
        ("optimizers: [adamw, ", "optimizers: [adamv, ", "grid.optimizers[0]", "adamw"),
        ("recipe: uniform ", "recipe: uniforn ", "grid.recipe", "did you mean uniform"),
        ("fallback: licences}", "fallback: license}", "fallback", "did you mean licences"),
        ("source: licences}", "source: licence}", "corpora.licences: source", "'local', not 'licence'"),
        ("{source: local, path", "{path", "corpora.local", "source is missing"),
        ("width: 128, heads: 4", "width: 130, heads: 4", "models.nano", "heads: 5"),
        ("heads: 4, context: 128}", "heads: 4, context: 128, mlp_ratio: 0.001}", "models.nano", "no hidden unit"),
        ("vocab_size: 1024", "vocab_size: 70000", "tokenizer", "less than or equal to 50257"),
        ("vocab_size: 1024", "vocab_size: 100", "tokenizer", "257"),
        (SEEDS, "seeds: [0, 0]", "grid", "twice"),
        (SEEDS, "seeds: []", "grid.seeds", "at least 1"),
        (SEEDS, 'seeds: ["00"]', "grid.seeds[0]", "integer"),
        ("lr_scales: [1]", 'lr_scales: ["1e-5"]', "grid.lr_scales[0]", "must be a number"),
        ("lr_scales: [1]", "lr_scales: [true]", "grid.lr_scales[0]", "must be a number"),
        ("formats: {}", "formats: {a-b: {exponent_bits: 4, mantissa_bits: 3}}", "formats.a-b: 'a-b' must be", "key"),
        ("  probes: 3", "  probes: 3\n  groups: [tensor]", "monitor.groups[0]", "'tensors', 'outputs'"),
        ("  probes: 3", "  groups: []\n  intervals: {updates: 9}", "monitor", "intervals names updates, which groups"),
        (BLOCK, "block, scale: pow2", "weight", "scale; take float32 or E8M0"),
        (BLOCK, "block, scale: E8M0, scale_rounding: ocp", "weight", "'even' or '4/6', not 'ocp'"),
        (BLOCK, "block, scale: BF16", "weight.scale", "take one such as E4M3"),
        (f"granularity: {BLOCK}", "granularity: row, scale: E4M3", "weight", "take float32 or E8M0"),
        (f"granularity: {BLOCK}", "granularity: tile, block: 1", "uniform_block[0].weight", "2 or more"),
        (BLOCK, "block, scale_rounding: 4/6", "weight", "such as E4M3"),
        ("16, scale: E4M3", "16, scale: E4M3, scale_rounding: even", "uniform_two_level[0].weight", "needs scale E8M0"),
        ("scaling: delayed},", "scaling: delayed}, hadamard: 16,", "uniform_delayed[0]", "which is rotated"),
        (UNIFORM, "weight: {format: FORMAT, block: 16}", "weight", "of granularity block or tile, not tensor"),
        (UNIFORM, "weight: {format: FORMAT, history: 9}", "weight", "of scaling delayed, not dynamic"),
        (UNIFORM, "weight: {format: FORMAT, reduce: most-recent}", "weight", "set scaling or remove reduce"),
        (ROWWISE, "weight: {format: MXFP8, block: 16}}", "recipes.ao_rowwise[0].weight", "block: 32"),
        (ROWWISE, "hadamard: 32}", "recipes.ao_rowwise", "0 or 16"),
        (ROWWISE, "torchao: rowwise, last: 0}", "recipes.ao_rowwise[0].last", "0"),
        (ROWWISE, "torchao: columnwise}", "recipes.ao_rowwise[0].torchao", "'rowwise_with_gw_hp', not"),
        (ROWWISE, "torchao: rowwise, grad: E3M4}", "recipes.ao_rowwise[0]", "remove grad or torchao"),
        (ROWWISE, "torchao: rowwise, accumulate: float32}", "recipes.ao_rowwise", "no setting accumulate"),
    ],
)
def test_a_mistake_is_one_sentence_with_place_and_cure(tmp_path, old, new, place, cure):
    with pytest.raises(UserError) as raised:
        load_params(params_with(tmp_path, (old, new)))
    message = str(raised.value)
    assert place in message and cure in message and "\n" not in message


def test_numbers_follow_yaml_1_2_and_an_emptied_section_has_no_entries(tmp_path):
    changes = (("lr: 3.0e-3", "lr: 1e-5"), ("formats: {} ", "formats:   "), ("overrides: {} ", "overrides:  "))
    params = load_params(params_with(tmp_path, *changes))
    assert params.optimizers["adamw"].lr == 1e-5 and params.formats == params.overrides == {}


@pytest.mark.parametrize(("content", "words"), [
    (b"\xff\xfe", "is not UTF-8"), (b"- a list\n", "must hold a mapping"), (b"", "must hold a mapping"),
    (b"day: 2026-02-30\n", "is not valid YAML"), (b"grid: ]", r"line \d+, column \d+ is not valid YAML"),
    (None, "run from the project's top folder"),
])  # fmt: skip
def test_a_file_that_holds_no_settings_is_an_error(tmp_path, content, words):
    if content is not None:
        (tmp_path / "params.yaml").write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_params(tmp_path / "params.yaml")


def test_the_command_prints_presets_or_one_line_and_fails(tmp_path):
    command = [sys.executable, "-m", "altgrad.config"]
    listed = subprocess.run([*command, "--presets"], capture_output=True, text=True, check=True).stdout
    assert YAML(typ="safe", pure=True).load(listed) == CONTENT | published_recipes()
    params_with(tmp_path, ("  steps: 200", "  steps: 0"))
    own = {**os.environ, "DVC_EXP_NAME": "mine"}  # as of `dvc exp run -S`, which leaves the setting there
    for environment, hint in ((os.environ, False), (own, True)):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert done.stderr.startswith("error: params.yaml: train.steps:")
        assert done.stderr.strip().endswith("`git checkout params.yaml` undoes it") == hint
