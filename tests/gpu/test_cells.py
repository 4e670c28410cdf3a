"""Whole cells on a GPU: near the CPU's losses, and the same bits again, also after a signal.

The rest of the tests trains on a GPU too where one is at hand, since ``train.device`` is ``auto``.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pandas as pd
import pytest
import torch

from altgrad.config import load_params
from altgrad.training import train_cell
from altgrad.training.run import make_trainer, settle
from tests.training.conftest import interruption, make_cell, make_tokens, trained

OF_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; CPUs have training/test_resume.py")
FORMATS = ("bf16", "E4M3", "E3M4", "E7M0") if torch.cuda.is_available() else ("E4M3",)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens")


def validation(root: Path) -> list[float]:
    rows = pd.read_csv(root / "out" / "history.csv")
    return rows["val_loss"].dropna().tolist()


@pytest.mark.parametrize("fmt", FORMATS)
def test_losses_are_near_those_of_the_cpu(device, tokens, tmp_path, fmt):
    """Products are summed in another order: what that changes is far below what another seed does.

    Without dropout, for which each kind of device has random numbers of its own.
    """
    found = {}
    for name, where, seed in (("here", device.type, 0), ("cpu", "cpu", 0), ("another", "cpu", 1)):
        cell = make_cell(fmt, seed=seed, device=where)
        without_dropout = cell.model_copy(update={"model": cell.model.model_copy(update={"dropout": 0.0})})
        trained(without_dropout, tokens, tmp_path / name)
        found[name] = torch.tensor(validation(tmp_path / name))
    apart = (found["here"] - found["cpu"]).abs().max()
    assert apart <= 0.1 * (found["another"] - found["cpu"]).abs().max()
    took = json.loads((tmp_path / "here/out/timing.json").read_text())
    assert took["device"] == device.type and took["peak_memory_mb"] > 0


@pytest.mark.parametrize(
    ("fmt", "compile_"),
    [
        ("E4M3", "off"),
        pytest.param("bf16", "off", marks=OF_A_GPU),
        pytest.param("bf16", "on", marks=pytest.mark.slow),
        pytest.param("E4M3", "on", marks=pytest.mark.long),
    ],
)
def test_it_repeats_and_resumes_with_the_same_bits(device, tokens, tmp_path, monkeypatch, fmt, compile_):
    cell = make_cell(fmt, scaling="delayed", device=device.type, compile=compile_)
    undisturbed = trained(cell, tokens, tmp_path / "once")
    assert trained(cell, tokens, tmp_path / "again") == undisturbed
    with interruption(monkeypatch, 5):
        train_cell(cell, tokens, tmp_path / "cut" / "out", tmp_path / "cut")
    assert trained(cell, tokens, tmp_path / "cut") == undisturbed
    assert json.loads((tmp_path / "cut/out/timing.json").read_text())["resumed"] == 1


@pytest.mark.parametrize("arm", ["adamw", "spacing_scaled", "adamw_sr_weights"])
def test_a_step_waits_for_the_device_once(device, tokens, tmp_path, arm):
    """For its loss and the norm of its gradients, where nothing is monitored; torch warns of every wait."""
    cell = make_cell(arm=load_params().optimizers[arm].model_dump(), device=device.type)
    trainer = make_trainer(cell, tokens, tmp_path, *settle(cell, tmp_path))
    trainer.update(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.update(3)  # at which nothing else is due
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    waits = [str(found.message) for found in caught if "synchronizing" in str(found.message)]
    assert len(waits) == (device.type == "cuda"), waits
