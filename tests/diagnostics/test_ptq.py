"""Quantization and pruning after training, and the commands on a finished cell.

Oracles: the losses that training wrote down, and the change of the loss itself.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from altgrad.common.files import read_json, write_json, write_text
from altgrad.config import Cell, UserError
from altgrad.diagnostics.__main__ import main
from altgrad.diagnostics.evaluated import AS_TRAINED, UNQUANTIZED, Evaluated, pruned, quantized, without_smallest
from altgrad.diagnostics.saved import RebuiltModel
from altgrad.diagnostics.what_if import SPLITS, probe, rounded, spec_of
from altgrad.model.from_cell import recipe_of
from altgrad.training.run import train_cell
from tests.training.conftest import make_cell, make_tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a pipeline with the cells bf16 and E4M3 leaves."""
    root = tmp_path_factory.mktemp("pipeline")
    data = root / "data"
    make_tokens(data / "tokens")
    cells = [make_cell(fmt, steps=30, eval_every=30, grad_accumulation=1) for fmt in ("bf16", "E4M3")]
    for cell in cells:
        write_text(data / "grid" / f"{cell.key}.json", cell.to_json())
        train_cell(cell, data / "tokens", data / "runs" / cell.key, root)
    write_json(data / "grid" / "index.json", {"cells": [cell.key for cell in cells]})
    return data


def cell_of(data: Path, fmt: str) -> Cell:
    return Cell.read(data / "grid" / f"{fmt}-adamw-0-1.json")


@pytest.mark.parametrize("fmt", ["bf16", "E4M3"])
def test_the_loss_as_trained_is_the_one_that_training_wrote_down(data: Path, fmt: str) -> None:
    cell = cell_of(data, fmt)
    run = data / "runs" / cell.key
    found = quantized(cell, run, data / "tokens", ["E4M3"])
    assert found[AS_TRAINED] == pytest.approx(read_json(run / "metrics.json")["val_loss"], rel=1e-6)
    assert (found[UNQUANTIZED] == found[AS_TRAINED]) == (fmt == "bf16")


def test_the_coarser_the_mantissa_the_more_it_costs(data: Path) -> None:
    cell = cell_of(data, "bf16")
    found = quantized(cell, data / "runs" / cell.key, data / "tokens")
    assert set(found) == {AS_TRAINED, UNQUANTIZED, *SPLITS}
    cost = {name: abs(found[name] - found[UNQUANTIZED]) for name in SPLITS}
    assert cost["E7M0"] > cost["E5M2"] > cost["E3M4"]


def test_the_loss_change_predicted_is_that_of_the_rebuilt_model(data: Path) -> None:
    """A fifth of the error of one layer's weight: small enough for a straight line."""
    cell = cell_of(data, "bf16")
    run = data / "runs" / cell.key
    found = probe(cell, run, data / "tokens", 64)["blocks.0.mlp.up"]
    saved = load_file(run / "model.safetensors")
    error = 0.2 * (rounded(found.weight, spec_of("E5M2", "tensor")) - found.weight)
    before = RebuiltModel.of(cell, saved, data / "tokens", 64).loss().double()
    saved["blocks.0.mlp.up.weight"] = saved["blocks.0.mlp.up.weight"] + error
    after = RebuiltModel.of(cell, saved, data / "tokens", 64).loss().double()
    assert (after - before).item() == pytest.approx(found.loss_change("weight", error)[0], rel=0.05)


def test_pruning_nothing_is_the_loss_that_training_wrote_down_and_pruning_all_leaves_the_embeddings(data: Path) -> None:
    """Oracle of the second: with every product of the blocks zero, a token's logits come of its own embedding."""
    cell = cell_of(data, "E4M3")
    run = data / "runs" / cell.key
    found = pruned(cell, run, data / "tokens", [0.1, 0.6, 1.0])
    assert list(found) == [0.0, 0.1, 0.6, 1.0]
    assert found[0.0] == pytest.approx(read_json(run / "metrics.json")["val_loss"], rel=1e-6)
    evaluated = Evaluated(cell, run, data / "tokens")
    zeroed = {
        name: 0 * weight if name.startswith("blocks.") and weight.ndim == 2 else weight
        for name, weight in evaluated.saved.items()
    }
    assert found[1.0] == evaluated.loss(zeroed, recipe_of(cell))
    assert abs(found[0.1] - found[0.0]) < abs(found[0.6] - found[0.0]) < abs(found[1.0] - found[0.0])


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_the_smallest_weights_are_pruned_and_as_many_as_asked(share: float) -> None:
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(3))
    weight[0] = 0.125  # twelve of one size, of which some may go and some stay
    found = without_smallest(weight, share)
    gone = found != weight
    assert gone.sum() == round(share * weight.numel()) and (found[gone] == 0).all()
    assert share in (0, 1) or weight[gone].abs().max() <= weight[~gone].abs().min()


def test_the_commands_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["what-if", "E4M3-adamw-0-1", "--data", str(data), "--out", str(tmp_path), "--tokens", "32"])
    said = capsys.readouterr().out
    assert "what_if:" in said and (tmp_path / "E4M3-adamw-0-1.png").is_file()
    rows = pd.read_csv(tmp_path / "E4M3-adamw-0-1.csv")
    assert set(rows.format) == set(SPLITS) and set(rows.role) == {"weight", "input", "grad"}
    main(["ptq", "bf16-adamw-0-1", "--data", str(data)])
    said = capsys.readouterr().out
    assert "Mean of 1 cell" in said
    val_loss = read_json(data / "runs/E4M3-adamw-0-1/metrics.json")["val_loss"]
    row = next(line.split() for line in said.splitlines() if line.startswith("E4M3 "))
    assert float(row[-1]) == pytest.approx(val_loss, abs=6e-5)  # trained so, of the formats in the grid
    cells, out = ["bf16-adamw-0-1", "E4M3-adamw-0-1"], str(tmp_path / "p.csv")
    main(["prune", *cells, "--data", str(data), "--shares", "0.5", "--out", out])
    assert "Mean of 2 cells" in capsys.readouterr().out
    rows = pd.read_csv(tmp_path / "p.csv")
    assert list(zip(rows.format, rows.share, strict=True)) == [("bf16", 0), ("bf16", 0.5), ("E4M3", 0), ("E4M3", 0.5)]
    assert rows.cost.tolist() == pytest.approx(
        [0, rows.after[1] - rows.after[0], 0, rows.after[3] - rows.after[2]], abs=3e-6
    )


def test_mistakes_are_told_in_a_sentence(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no cell 'E4M4-adamw-0-1'; did you mean E4M3-adamw-0-1"):
        main(["what-if", "E4M4-adamw-0-1", "--data", str(data)])
    write_text(tmp_path / "grid/bf16-adamw-0-1.json", cell_of(data, "bf16").to_json())
    for command in ("ptq", "prune"):
        with pytest.raises(UserError, match="bf16-adamw-0-1 is not finished"):
            main([command, "bf16-adamw-0-1", "--data", str(tmp_path)])
