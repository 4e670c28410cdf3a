"""Cells whose operands are rounded by chance: repeated, watched and interrupted they end with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from altgrad.config import Cell
from altgrad.config.files import read_json
from altgrad.training.run import make_trainer
from tests.training.conftest import diagnosed, make_cell, resumed, trained


def cell_of(
    seed: int = 0, every: int = 5, dropout: float = 0.1, rounding: str = "stochastic", scaling: str = "delayed",
    **train: object,
) -> Cell:  # fmt: skip
    cell = make_cell(seed=seed, **train)
    tensor = {"format": "E4M3", "rounding": rounding, "scaling": scaling}
    rules = [{"layers": "*", "weight": tensor | {"scaling": "dynamic"}, "input": tensor, "grad": tensor}]
    made = json.loads(cell.to_json()) | {"rules": rules}
    changed = {"monitor": made["monitor"] | {"every": every}, "model": made["model"] | {"dropout": dropout}}
    return Cell.model_validate(made | changed)


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return trained(cell_of(), tokens, tmp_path_factory.mktemp("undisturbed"))


def test_the_same_cell_gives_the_same_bits_and_another_seed_others(tokens, undisturbed, tmp_path):
    assert trained(cell_of(), tokens, tmp_path / "again") == undisturbed
    assert trained(cell_of(seed=1), tokens, tmp_path / "other")["history.csv"] != undisturbed["history.csv"]


def test_watching_does_not_change_it(tokens, undisturbed, tmp_path):
    found = trained(cell_of(every=1), tokens, tmp_path)
    for name in set(undisturbed) - {"monitors.parquet"}:
        assert found[name] == undisturbed[name], name


@pytest.mark.parametrize("step", [3, 5])
def test_an_interrupted_run_ends_with_the_same_bits(tokens, undisturbed, tmp_path, monkeypatch, step):
    assert resumed(cell_of(), tokens, tmp_path, monkeypatch, step) == undisturbed


@pytest.mark.parametrize("scaling", ["dynamic", "delayed"])
def test_an_evaluation_rounds_to_nearest(tokens, tmp_path, scaling):
    """It gives the loss of the same recipe without chance, and draws no numbers."""
    losses = []
    for rounding in ("nearest", "stochastic"):
        cell = cell_of(dropout=0.0, rounding=rounding, scaling=scaling)
        scratch = tmp_path / rounding
        scratch.mkdir()
        size = read_json(tokens / "meta.json")["vocab_size"]
        trainer = make_trainer(cell, size, tokens, scratch, torch.device("cpu"), "float32", compiled=False)
        losses += [trainer.evaluation.loss(), trainer.evaluation.loss()]
        drawn = [buffer[2].item() for name, buffer in trainer.model.named_buffers() if name.endswith(".stream")]
        assert len(drawn) == (15 if rounding == "stochastic" else 0) and not any(drawn)
    assert losses == losses[:1] * 4


def test_it_is_diagnosed(tokens, tmp_path):
    trained(cell_of(), tokens, tmp_path)
    assert diagnosed(cell_of(), tmp_path / "out", tmp_path)[0]["status"] == "ok"


@pytest.mark.slow
def test_a_compiled_cell_ends_where_an_eager_one_does(tokens, tmp_path):
    """Without dropout, for which the compiler has random numbers of its own."""
    losses = []
    for compile in ("off", "on"):
        trained(cell_of(dropout=0.0, compile=compile, steps=3, compute="float32"), tokens, tmp_path / compile)
        losses.append(read_json(tmp_path / compile / "out" / "metrics.json")["val_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
