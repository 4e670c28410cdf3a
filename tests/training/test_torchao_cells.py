"""Cells that torchao quantizes train, are watched and diagnosed like any other."""

from __future__ import annotations

import copy
import dataclasses

import pandas as pd
import pytest
import torch

from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.formats import get_format
from altgrad.model import GPT, unquantize_model
from altgrad.model.from_cell import build_model
from altgrad.training import train_cell
from tests.training.conftest import VOCABULARY, diagnosed, make_cell

RECIPES = {"tensorwise": "E5M2", "rowwise": "E4M3", "rowwise_with_gw_hp": "E4M3"}  # and the gradients' format


def ao_cell(recipe: str = "tensorwise", layers: str = "blocks.*", **train) -> Cell:
    values = make_cell("bf16", **train).model_dump()
    key = f"ao_{recipe}-adamw-0-1"
    formats = {name: dataclasses.asdict(get_format(name)) for name in {"E4M3", RECIPES[recipe]}}
    rules = [{"layers": layers, "torchao": recipe}]
    return Cell.model_validate(values | {"key": key, "format": f"ao_{recipe}", "rules": rules, "formats": formats})


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cell_trains_is_watched_and_is_diagnosed(tokens, tmp_path, recipe):
    cell, out = ao_cell(recipe), tmp_path / "out"
    train_cell(cell, tokens, out, tmp_path)
    metrics = read_json(out / "metrics.json")
    assert metrics["outcome"] == "completed"
    assert metrics["quantized_parameters"] == 12 * 16 * 16  # the block's four matrices, not the head
    rows = pd.read_parquet(out / "monitors.parquet")
    seen = rows[(rows["metric"] == "sqnr_db") & (rows["step"] == 10)]
    assert set(seen["role"]) == {"input", "weight", "grad"} and "head" not in set(seen["layer"])
    least = seen.groupby("role")["value"].min()
    assert least["weight"] > 28 and least["grad"] > (20 if recipe == "tensorwise" else 25)
    diagnosis, _ = diagnosed(cell, out, tmp_path)
    formats = {"weight": "E4M3", "input": "E4M3", "grad": RECIPES[recipe]}
    assert diagnosis["status"] == "ok" and diagnosis["layers"]["blocks.0.mlp.up"]["formats"] == formats
    assert diagnosis["layers"]["head"]["formats"] == dict.fromkeys(formats)
    assert diagnosis["summary"]["sqnr_db"] > 28 and diagnosis["summary"]["grad_cosine"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_cell_ends_where_an_eager_one_does(tokens, tmp_path, recipe):
    """Not to the bit: the compiler leaves out roundings to bfloat16, of a GELU say, before torchao casts the result."""
    losses = []
    for compile in ("off", "on"):
        cell = ao_cell(recipe, compile=compile, steps=2)
        train_cell(cell, tokens, tmp_path / compile, tmp_path / f"root-{compile}")
        losses.append(read_json(tmp_path / compile / "metrics.json")["val_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.parametrize("make", [ao_cell, make_cell])
def test_the_unquantized_copy_is_the_plain_model_with_the_same_weights(make):
    model = build_model(make(), VOCABULARY, torch.device("cpu")).eval()
    unquantized, plain = unquantize_model(copy.deepcopy(model)), GPT(model.config).eval()
    tokens = torch.randint(VOCABULARY, (2, 8))
    plain.load_state_dict(model.state_dict(), strict=False)
    assert "Float8Linear" not in str(unquantized) and torch.equal(unquantized(tokens), plain(tokens))
