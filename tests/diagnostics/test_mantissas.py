"""Where the largest elements of blocks lie. Oracles: numpy's frexp, quantizing by floor, and the softmax by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import functional as F

from altgrad.common.files import write_json, write_text
from altgrad.config import Cell
from altgrad.diagnostics.__main__ import main
from altgrad.diagnostics.saved import SavedRun, plain_model
from altgrad.diagnostics.what_if import PARTS, clamped, histogram, mantissas
from altgrad.numerics import format_constants
from altgrad.numerics.sums import block_statistics
from altgrad.training.run import train_cell
from tests.training.conftest import make_cell, make_tokens, without_dropout


@pytest.fixture(scope="module", params=["float32", "bf16"])
def finished(request, tmp_path_factory) -> tuple[Cell, Path, Path]:
    """Return a cell that is not quantized, its run, and the pipeline's folder."""
    root = tmp_path_factory.mktemp("mantissas")
    cell = without_dropout(make_cell("bf16", compute=request.param, steps=6, batch=8, loss_scale=0.75))
    write_text(root / "data/grid" / f"{cell.key}.json", cell.to_json())
    write_json(root / "data/grid/index.json", {"cells": [cell.key]})
    make_tokens(root / "data/tokens")
    train_cell(cell, root / "data/tokens", root / "data/runs" / cell.key, root)
    return cell, root / "data/runs" / cell.key, root / "data"


def by_numpy(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of blocks and of magnitude by part of a binade."""
    padded = np.pad(np.abs(t.astype(np.float64)), ((0, 0), (0, -t.shape[1] % 32)))
    largest = padded.reshape(len(t), -1, 32).max(axis=-1).ravel()
    largest = largest[largest > 0]
    place = np.floor((2 * np.frexp(largest)[0] - 1) * PARTS).astype(int)
    counts = [np.bincount(place, weights=w, minlength=PARTS) for w in (np.ones_like(largest), largest)]
    return counts[0] / counts[0].sum(), counts[1] / counts[1].sum()


def test_a_histogram_is_numpys():
    t = torch.randn(40, 70, generator=torch.Generator().manual_seed(0)) * torch.arange(-20, 20.0)[:, None].exp2()
    t[3, :32], t[5] = 0, 0
    t[7, 32:64] = 2.0**-9  # at the very start of its binade
    parts, blocks, magnitude = zip(*histogram(t), strict=True)
    wanted = by_numpy(t.numpy())
    assert parts == tuple(1 + i / 16 for i in range(16))
    assert blocks == pytest.approx(wanted[0]) and magnitude == pytest.approx(wanted[1])


@pytest.mark.parametrize("fmt", ["E4M3", "E5M2", "E2M3", "E2M1"])
def test_what_floor_would_clamp_is_what_it_clamps(fmt):
    """No element lies on the format's end itself, where a block stands beyond it in a histogram and is not clamped."""
    t = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    table = pd.DataFrame([(0, "a", "grad", *row) for row in histogram(t)],
                         columns=["step", "layer", "role", "significand", "blocks", "magnitude"])  # fmt: skip
    options = {"block": 32, "scale_rounding": "floor"}
    found = block_statistics(t, format_constants(fmt, scale_format="E8M0"), **options)
    assert clamped(table, fmt)["blocks"].item() == pytest.approx(found.saturated) and found.saturated > 0


def test_the_heads_gradient_is_the_steps(finished):
    """As many tokens and the same factor of the loss, at every snapshot, rounded to the dtype of the products."""
    cell, run, data = finished
    table = mantissas(cell, run, data / "tokens")
    dtype = torch.bfloat16 if cell.train.compute == "bf16" else torch.float32
    assert sorted(set(table["step"])) == [0, 3, 6]
    for step in (0, 3, 6):
        with SavedRun(cell, run) as saved:
            model, inputs, targets = plain_model(cell, saved.model(step), data / "tokens", 2 * 8 * 16)
        assert inputs.numel() == 2 * 8 * 16
        p = model(inputs).float().flatten(0, 1).softmax(dim=-1).detach()
        gradient = 0.75 * (p - F.one_hot(targets.flatten(), p.shape[1])) / (2 * 8 * 16)  # of the mean over a step's
        blocks, magnitude = by_numpy(gradient.to(dtype).float().numpy())
        own = table[(table["step"] == step) & (table["layer"] == "head") & (table["role"] == "grad")]
        assert np.abs(own["blocks"] - blocks).max() < 0.02 and np.abs(own["magnitude"] - magnitude).max() < 0.02


def test_the_command_writes_it_and_says_which_tensors(finished, tmp_path, capsys):
    cell, _, data = finished
    main(["mantissas", cell.key, "--data", str(data), "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "\n19 and 25.\n" in said and said.count("grad") == 5
    table = pd.read_csv(tmp_path / f"{cell.key}.csv")
    sums = table.groupby(["step", "layer", "role"])[["blocks", "magnitude"]].sum()
    assert len(sums) == 3 * 5 * 3 and np.allclose(sums, 1, atol=1e-4)
