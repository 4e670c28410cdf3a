"""A cell whose optimizer state is stored in a format: it resumes to the same bits, and its bytes are what it says."""

import json

import torch
from safetensors.torch import load_file

from altgrad.training.run import train_cell
from tests.training.conftest import interruption, make_cell
from tests.training.test_run import outputs, trained

STOCHASTIC = {"format": "UE4M4", "rounding": "stochastic"}


def test_a_run_with_codes_for_state_resumes_to_the_same_bits(tokens, tmp_path, monkeypatch):
    cell = make_cell(arm={"lr": 1e-2, "stiffness": "ulp", "state": {"m": "E4M3", "v": STOCHASTIC, "least": 0}})
    undisturbed = trained(cell, tokens, tmp_path / "once")
    root = tmp_path / "twice"
    with interruption(monkeypatch, 7):
        train_cell(cell, tokens, root / "out", root)
    saved = load_file(max((root / "scratch").rglob("step-*.safetensors")))
    codes = [t for name, t in saved.items() if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert codes and all(t.dtype == torch.uint8 for t in codes)
    train_cell(cell, tokens, root / "out", root)
    assert outputs(root / "out") == undisturbed
    timing = json.loads((root / "out" / "timing.json").read_text())
    assert timing["bytes_weights"] + timing["bytes_masters"] == timing["bytes_grads"] == 4
    assert 1 < timing["bytes_m"] == timing["bytes_v"] < 1.2
