"""Cells of the recipes with two-level scales train as any other, and what cannot is refused."""

from __future__ import annotations

import json

import pytest

from altgrad.config import Cell, Params, Resolver, UserError, load_params
from altgrad.optim.checks import check_cells
from altgrad.training.run import train_cell
from tests.training.conftest import VOCABULARY, make_cell

SHIPPED = load_params()


def cell_of(entry: str, arm: str = "adamw") -> Cell:
    """Return a tiny cell of a recipe of the shipped params.yaml."""
    grid = {"formats": ["bf16", entry], "optimizers": [arm], "seeds": [0]}
    params = SHIPPED.model_dump()
    params = Params.model_validate(params | {"grid": params["grid"] | grid})
    resolved = list(Resolver(params).cells())[1]
    tiny = make_cell("E4M3", steps=4)
    return tiny.model_copy(update={"key": resolved.key, "format": entry, "rules": resolved.rules, "arm": resolved.arm,
                                   "formats": resolved.formats})  # fmt: skip


@pytest.mark.parametrize(("entry", "arm"), [("NVFP4", "adamw"), ("uniform_two_level.E4M3", "spacing_scaled")])
def test_a_cell_trains(entry, arm, tokens, tmp_path, products):
    train_cell(cell_of(entry, arm), tokens, tmp_path / "out", tmp_path)
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["outcome"] == "completed" and found["quantized_parameters"] > 0


def test_what_cannot_train_is_one_sentence_before_training():
    with pytest.raises(UserError, match="^params.yaml: recipe of cell uniform_two_level.FP16-adamw-0-1: weight: no op"):
        check_cells([cell_of("uniform_two_level.FP16")], VOCABULARY, "bf16")
    with pytest.raises(UserError, match="hold one scale that their optimizer sets"):
        check_cells([cell_of("NVFP4", "rung")], VOCABULARY, "bf16")
