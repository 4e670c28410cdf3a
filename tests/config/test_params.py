"""Laws of params.yaml: what is wrong is said in one sentence that names the place and a way out.

The oracle for YAML 1.2 is its specification (numbers such as 1e-5); for near matches, a person's eye.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from altgrad.common.errors import did_you_mean, near_matches, run_stage
from altgrad.common.files import canonical_json, replacing, write_text
from altgrad.config import UserError, load_params
from altgrad.config.params import PRESETS

SHIPPED = Path(__file__).parents[2] / "params.yaml"


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


def test_the_shipped_params_are_valid():
    params = load_params(SHIPPED)
    assert params.models[params.model].layers == 2
    assert params.tokenizer.vocab_size == 1024


def test_presets_in_the_file_itself_change_nothing(tmp_path):
    assert load_params(params_with(tmp_path)) == load_params(SHIPPED)


def test_numbers_follow_yaml_1_2(tmp_path):
    path = params_with(tmp_path, ("lr: 3.0e-3", "lr: 1e-5"))
    assert load_params(path).optimizers["adamw"].lr == 1e-5


@pytest.mark.parametrize(
    ("old", "new", "place", "cure"),
    [
        ("  steps: 200", "  steps: -3", "train.steps", "-3"),
        ("  steps: 200", "  steps: .nan", "train.steps", "finite"),
        ("  steps: 200", "  stepz: 200", "train", "did you mean steps"),
        ("lr: 3.0e-3", "lr: -1", "optimizers.adamw.lr", "greater than 0"),
        ("lr: 3.0e-3", "lr: .inf", "optimizers.adamw.lr", "inf"),
        ("eps: 1.0e-8", "betas: [0.9, 1.5]", "optimizers.adamw.betas[1]", "less than 1"),
        ("eps: 1.0e-8", "decay: 1.0", "optimizers.adamw.decay", "less than 1"),
        ("eps: 1.0e-8", "decay: null", "optimizers.adamw", "decay and plain_decay need each other"),
        ("eps: 1.0e-8", "weight_decay: 0.1", "optimizers.adamw", "mean two shares; remove one of"),
        ("corpus: licences ", "corpus: licenses ", "corpus", "did you mean licences"),
        ("model: pico ", "model: picco ", "model", "did you mean pico"),
        ("optimizers: [adamw, ", "optimizers: [adamv, ", "grid.optimizers[0]", "adamw"),
        ("stiffness: ulp,", "stiffness: foreign,", "optimizers.spacing_scaled", "need each other"),
        ("rung, lr: 2.0, weights: quantized", "rung, lr: 2.0", "optimizers.rung", "weights: quantized"),
        ("base: sgd, lr: 0.1", "base: sgd, acts: gradient, lr: 0.1", "optimizers.sgd", "remove it"),
        (
            "weights: quantized, rounding: stochastic, max_rungs: 8",
            "weights: grid",
            "optimizers.rung",
            "weights: input should be 'master' or 'quantized', not 'grid'",
        ),
        ("max_rungs: 8", "grid_scale: fixed", "optimizers.rung", "'grid_scale'; did you mean held_scale"),
        ("granularity: block, scale: E8M0", "granularity: block, scale: pow2", "weight", "scale; take float32 or E8M0"),
        ("block, scale: E8M0", "block, scale: E8M0, scale_rounding: down", "weight", "'even' or '4/6', not 'down'"),
        ("block, scale: E8M0", "block, scale: E8M0, scale_rounding: ocp", "weight", "'even' or '4/6', not 'ocp'"),
        ("compute: bf16 ", "compute: fp32 ", "params.yaml: train.compute: ", "'bf16' or 'float32', not 'fp32'"),
        ("torchao: rowwise}", "accumulate: fp32}", "recipes.ao_rowwise[0]", "'bf16' or 'float32', not 'fp32'"),
        ("granularity: block, scale: E8M0", "granularity: block, scale: BF16", "weight.scale", "take one such as E4M3"),
        ("granularity: block, scale: E8M0", "granularity: row, scale: E4M3", "weight", "take float32 or E8M0"),
        ("16, scale: E4M3", "16, scale: E4M3, scale_rounding: even", "uniform_two_level[0].weight", "needs scale E8M0"),
        ("granularity: block, scale: E8M0", "granularity: tile, block: 1", "uniform_block[0].weight", "2 or more"),
        ("granularity: block, scale: E8M0", "granularity: block, scale_rounding: 4/6", "weight", "such as E4M3"),
        ("torchao: rowwise}", "hadamard: 32}", "recipes.ao_rowwise", "0 or 16"),
        ("scaling: delayed},", "scaling: delayed}, hadamard: 16,", "uniform_delayed[0]", "which is rotated"),
        ("torchao: rowwise}", "torchao: rowwise, last: 0}", "recipes.ao_rowwise[0].last", "0"),
        ("recipe: uniform ", "recipe: uniforn ", "grid.recipe", "did you mean uniform"),
        ("width: 128, heads: 4", "width: 130, heads: 4", "models.nano", "heads: 5"),
        ("vocab_size: 1024", "vocab_size: 70000", "tokenizer", "uint16"),
        ("vocab_size: 1024", "vocab_size: 100", "tokenizer", "257"),
        ("seeds: [0, 1, 2, 3, 4]", "seeds: [0, 0]", "grid", "twice"),
        ("seeds: [0, 1, 2, 3, 4]", "seeds: []", "grid.seeds", "at least 1"),
        ("seeds: [0, 1, 2, 3, 4]", 'seeds: ["00"]', "grid.seeds[0]", "integer"),
        ("lr_scales: [1]", 'lr_scales: ["1e-5"]', "grid.lr_scales[0]", "must be a number"),
        ("lr_scales: [1]", "lr_scales: [true]", "grid.lr_scales[0]", "must be a number"),
        ("formats: {}", "formats: {a-b: {exponent_bits: 4, mantissa_bits: 3}}", "formats.a-b: 'a-b' must be", "key"),
        ("  adamw: {", "  adamw: E4M3\n  own: {", "optimizers.adamw", "settings, such as {name: value}, not 'E4M3'"),
        ("weight: FORMAT", "weight: {format: FORMAT, block: 16}", "weight", "of granularity block or tile, not tensor"),
        ("weight: FORMAT", "weight: {format: FORMAT, history: 9}", "weight", "of scaling delayed, not dynamic"),
        ("weight: FORMAT", "weight: {format: FORMAT, reduce: most-recent}", "weight", "set scaling or remove reduce"),
        ("torchao: rowwise}", "weight: {format: MXFP8, block: 16}}", "recipes.ao_rowwise[0].weight", "block: 32"),
        ("  steps: 200", "  steps: true", "train", "steps must not be true"),
        ("  compile: auto", "  compile: true", "train", "compile must not be true; write auto or on or off"),
        ("  clip: 1.0", "  clip: .inf", "train.clip", "inf"),
        ("  probes: 3", "  probes: 3\n  groups: [tensor]", "monitor.groups[0]", "'tensors', 'outputs'"),
        ("  probes: 3", "  groups: []\n  intervals: {updates: 9}", "monitor", "intervals names updates, which groups"),
        ("heads: 4, context: 128}", "heads: 4, context: 128, mlp_ratio: 0.001}", "models.nano", "no hidden unit"),
        ("{source: local, path", "{path", "corpora.local", "source is missing"),
        ("source: local, path: data/corpus", "source: local, path: 3", "corpora.local.path", "string"),
        ("source: licences}", "source: licence}", "corpora.licences: source", "'local', not 'licence'"),
        ("device: auto", "device: gpu", "train.device", "'cuda'"),
        ("fallback: licences}", "fallback: license}", "fallback", "did you mean licences"),
        ("torchao: rowwise}", "torchao: columnwise}", "recipes.ao_rowwise[0].torchao", "'rowwise_with_gw_hp', not"),
        ("torchao: rowwise}", "torchao: rowwise, weight: E4M3}", "recipes.ao_rowwise[0]", "remove weight or torchao"),
        ("torchao: rowwise}", "torchao: rowwise, grad: E3M4}", "recipes.ao_rowwise[0]", "remove grad or torchao"),
        ("torchao: rowwise}", "torchao: rowwise, accumulate: float32}", "recipes.ao_rowwise", "no setting accumulate"),
        ("torchao: rowwise}", "torchao: rowwise, gradient: clipped}", "recipes.ao_rowwise[0]", "remove gradient"),
    ],
)
def test_a_mistake_is_one_sentence_with_place_and_cure(tmp_path, old, new, place, cure):
    with pytest.raises(UserError) as raised:
        load_params(params_with(tmp_path, (old, new)))
    message = str(raised.value)
    assert place in message and cure in message
    assert "\n" not in message


def test_text_that_is_not_yaml_is_located(tmp_path):
    path = params_with(tmp_path, ("grid: ", "grid: ]"))
    with pytest.raises(UserError, match=r"line \d+, column \d+ is not valid YAML"):
        load_params(path)


def test_an_emptied_section_has_no_entries(tmp_path):
    params = load_params(params_with(tmp_path, ("formats: {} ", "formats:   "), ("overrides: {} ", "overrides:  ")))
    assert params.formats == params.overrides == {}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"- a list\n", b"", b"day: 2026-02-30\n"])
def test_a_file_that_holds_no_settings_is_an_error(tmp_path, content):
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError):
        load_params(path)


def test_a_missing_file_says_where_to_run(tmp_path):
    with pytest.raises(UserError, match="top folder"):
        load_params(tmp_path / "params.yaml")


def test_the_command_prints_one_line_and_fails(tmp_path):
    params_with(tmp_path, ("  steps: 200", "  steps: 0"))
    command = [sys.executable, "-m", "altgrad.config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: params.yaml: train.steps:") and done.stderr.count("\n") == 1
    assert "git checkout" not in done.stderr
    own = {**os.environ, "DVC_EXP_NAME": "mine"}  # as of `dvc exp run -S`, which leaves the setting there
    of_dvc = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=own)
    assert of_dvc.stderr.strip().endswith("`git checkout params.yaml` undoes it") and of_dvc.stderr.count("\n") == 1


def test_near_matches_ignore_case():
    assert did_you_mean("e4m3", ["E4M3", "E5M2"]).startswith("; did you mean E4M3")
    assert did_you_mean("zzz", ["E4M3"]) == "; known: E4M3"
    assert did_you_mean("zzz", []) == ""
    assert did_you_mean("zzz", ["E4M3"], "; read on") == "; read on"
    assert near_matches(" E4M3 ", ["E5M2", "E4M3", "E4M2", "E4M1", "UE4M3"])[0] == "E4M3"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_canonical_json_refuses_what_json_cannot_hold():
    assert canonical_json({"b": 1, "a": 2}) == canonical_json({"a": 2, "b": 1})
    with pytest.raises(ValueError):
        canonical_json({"loss": float("nan")})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_sentence(monkeypatch, code):
    def main(arguments):
        raise OSError(code, "No space left on device", "data/runs/model.safetensors")

    monkeypatch.setattr(sys, "argv", ["stage"])
    with pytest.raises(SystemExit) as raised:
        run_stage(main)
    message = raised.value.code
    assert message.startswith("error: the disk is full while writing data/runs/model.safetensors")
    assert "\n" not in message


def test_a_defect_of_the_bench_keeps_its_traceback(monkeypatch):
    def main(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "argv", ["stage"])
    with pytest.raises(ZeroDivisionError):
        run_stage(main)
