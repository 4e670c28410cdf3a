"""Laws of a cell that starts from weights: they are where it begins, and a changed file is another cell.

Oracle: the loaded model itself, its loss computed here; transformers writes the file, or a run that is continued.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from altgrad.common.files import read_json, write_text
from altgrad.config import Cell, Resolver, UserError, load_params
from altgrad.config.params import Params, validated
from altgrad.data.batches import TokenFile, validation_sample
from altgrad.execution.settings import keep_start
from altgrad.model import load_published
from altgrad.optim.checks import check_cells
from altgrad.training import train_cell
from tests.training.conftest import VOCABULARY

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY + 4, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


def cells(model: object, **changes: object) -> list[Cell]:
    train = {"steps": 4, "batch": 4, "eval_every": 4, "eval_sequences": 10, "log_every": 2, "compile": "off"}
    grid = {"formats": ["bf16", "E4M3"], "optimizers": ["adamw"], "seeds": [0], "lr_scales": [1]}
    values = PARAMS.model_dump() | {"model": model, "train": train | {"compute": "float32"}, "grid": grid} | changes
    return list(Resolver(validated(Params, values, "params.yaml")).cells())


def test_the_loss_before_the_first_step_is_that_of_the_weights(folder, tokens, tmp_path):
    plain, quantized = cells({"from": str(folder), "context": 16})
    check_cells([plain, quantized], VOCABULARY, "bf16")
    model = load_published(folder).eval()
    inputs, targets = validation_sample(TokenFile(tokens, "val"), 10, 16)
    with torch.no_grad():
        expected = model(inputs, targets).item()
    found = {}
    for cell in (plain, quantized):
        train_cell(cell, tokens, tmp_path / cell.key, tmp_path)
        with open(tmp_path / cell.key / "history.csv") as rows:
            first, *_, last = csv.DictReader(rows)
        assert first["step"] == "0"
        found[cell.format] = float(first["val_loss"])
        assert float(last["val_loss"]) != found[cell.format]
    assert found["bf16"] == pytest.approx(expected, rel=1e-6)
    assert found["E4M3"] == pytest.approx(expected, rel=0.05) and found["E4M3"] != found["bf16"]


TINY = {"layers": 1, "width": 16, "heads": 2, "context": 16}


def first_loss(run: Path) -> float:
    with open(run / "history.csv") as rows:
        return float(next(csv.DictReader(rows))["val_loss"])


def test_a_run_goes_on_from_a_copy_of_one_and_the_copy_outlives_it(tokens, tmp_path, monkeypatch):
    """The run's own key is trained over, and the same setting given again names the same copy."""
    monkeypatch.chdir(tmp_path)
    cell = cells("tiny", models={"tiny": TINY})[1]
    write_text(tmp_path / "data/grid" / f"{cell.key}.json", cell.to_json())
    run = Path("data/runs") / cell.key
    train_cell(cell, tokens, tmp_path / run, tmp_path)
    ended = read_json(run / "metrics.json")["val_loss"]
    params = {"start": None}
    for _ in range(2):
        setting = keep_start(f"start={run}", params)
        params["start"] = setting.removeprefix("start=")
        (again,) = (c for c in cells("tiny", models={"tiny": TINY}, **params) if c.key == cell.key)
        check_cells([again], VOCABULARY, "bf16")
        train_cell(again, tokens, tmp_path / run, tmp_path)
        assert first_loss(run) == pytest.approx(ended, rel=1e-6)
    assert [path.name for path in Path("data/weights").iterdir()] == [Path(params["start"]).name]
    plain = Path(shutil.copytree(params["start"], "elsewhere"))
    (plain / "config.json").unlink()
    assert cells("tiny", models={"tiny": TINY}, start=str(plain))[1].model.start.sha256 == again.model.start.sha256
    for model, start, words in (
        (TINY | {"heads": 4}, params["start"], "start: data/weights/.* has heads 2, and the model 4; change"),
        (TINY | {"width": 32}, str(plain), "tokens.weight is 300 x 16, and by params.yaml it should be 300 x 32"),
        (TINY | {"layers": 2}, str(plain), "has no blocks.1.norm1.weight, which params.yaml asks for"),
        (TINY | {"context": 32}, str(plain), "context 32 is more than the 16 positions of elsewhere"),
        (TINY, str(run), "start: data/runs/.* is where a run of this grid goes.*make repro SET='start=data/runs"),
        (TINY, "absent", "start: absent has no model.safetensors"),
        (TINY, str(tokens), "has no model.safetensors"),
        ({"from": params["start"]}, params["start"], "start: the model has weights to start from too"),
    ):
        with pytest.raises(UserError, match=words) as raised:
            check_cells(cells("tiny", models={"tiny": model}, start=start), VOCABULARY, "bf16")
        assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="data/runs/none holds no finished run"):
        keep_start("start=data/runs/none", params)


def test_a_preset_may_say_it_as_well_and_the_cell_holds_what_decides(folder):
    here = cells({"from": str(folder)})[0]
    named = cells("mine", models={"mine": {"from": str(folder)}})[0]
    assert here == named
    assert (here.model.layers, here.model.context, here.model.bias, here.model.gelu) == (1, 32, True, "tanh")
    assert here.model.start.vocab_size == VOCABULARY + 4 and len(here.model.start.sha256) == 64
    assert Cell.model_validate(here.model_dump()) == here


def test_a_changed_file_is_another_cell_and_trains_no_longer_as_this_one(folder, tokens, tmp_path):
    before = cells({"from": str(folder)})[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.wte.weight"][3, 4] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    after = cells({"from": str(folder)})[0]
    assert before.sha256() != after.sha256()
    with pytest.raises(UserError, match="not those that cell bf16-adamw-0-1 was resolved for"):
        train_cell(before, tokens, tmp_path / "out", tmp_path)


@pytest.mark.parametrize(("settings", "vocabulary", "words"), [
    ({}, 4096, f"weights in .* have {VOCABULARY + 4} tokens, and tokenizer.vocab_size is 4096"),
    ({}, VOCABULARY + 5, "make the two the same"),
    ({"context": 64}, VOCABULARY, "context 64 is more than the 32 positions"),
    ({"from": "no/such/folder"}, VOCABULARY, "no/such/folder has no config.json"),
    ({"layers": 3}, VOCABULARY, "unknown setting 'layers'"),
    ({"dropout": 2}, VOCABULARY, "models.*dropout"),
    ({"overrides": {"E4M3": {"model": {"width": 32}}}}, VOCABULARY,
     "wte.weight is 304 x 16, and by .* it should be 304 x 32"),
])  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_trains(folder, settings, vocabulary, words):
    changes = {"overrides": settings["overrides"]} if "overrides" in settings else {}
    model = {"from": str(folder)} | {name: value for name, value in settings.items() if name != "overrides"}
    with pytest.raises(UserError, match=words) as raised:
        check_cells(cells(model, **changes), vocabulary, "bf16")
    assert "\n" not in str(raised.value)
