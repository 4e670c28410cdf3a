"""Runs whose recipe quantizes attention's two products.

Oracles: a run that was not interrupted, and the loss that training wrote down.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.config.recipe import Rule
from altgrad.diagnostics.evaluated import AS_TRAINED, quantized
from tests.training.conftest import diagnosed, make_cell, resumed, trained

KINDS: dict[str, dict[str, Any]] = {
    "heads": {"granularity": "head"}, "stateful": {"scaling": "delayed", "rounding": "stochastic"},
}  # fmt: skip


def cell_of(kind: str, **train: Any) -> Cell:
    """Return a cell with quantized linear layers and products."""
    cell, spec = make_cell(**train), {"format": "E4M3"} | KINDS[kind]
    tensors = {"input": spec, "weight": spec, "grad": spec | {"format": "E5M2"}}
    rules = [Rule(layers=f"blocks.*.attn.{product}", **tensors) for product in ("scores", "values")]
    return cell.model_copy(update={"rules": [*cell.rules, *rules]})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_went_on_is_the_one_that_was_not_stopped(
    kind: str, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    whole = trained(cell_of(kind), tokens, tmp_path / "whole")
    assert resumed(cell_of(kind), tokens, tmp_path, monkeypatch) == whole
    plain = make_cell()
    assert trained(plain, tokens, tmp_path / "plain")["history.csv"] != whole["history.csv"]
    diagnosis, rows = diagnosed(cell_of(kind), tmp_path / "out", tmp_path, tokens)
    assert diagnosis["status"] == "ok" and not [name for name in set(rows["layer"]) if "scores" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rebuilt_model_has_the_loss_that_training_wrote_down(kind: str, tokens: Path, tmp_path: Path) -> None:
    cell = cell_of(kind)
    trained(cell, tokens, tmp_path)
    metrics = read_json(tmp_path / "out" / "metrics.json")
    found = quantized(cell, tmp_path / "out", tokens, [])
    assert found[AS_TRAINED] == pytest.approx(metrics["val_loss"], rel=1e-6)
    histories = [name for name in load_file(tmp_path / "out" / "model.safetensors") if "attn.scores" in name]
    assert bool(histories) == (kind == "stateful")
