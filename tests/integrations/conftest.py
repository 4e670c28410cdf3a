"""Small models and their runs, recorded; what came of a run is read as `make watch` and the report read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from altgrad.config.tasks import HISTORY
from altgrad.integrations import Recorder
from altgrad.model import Recipe, quantize_model
from altgrad.optim import Arm, ArmOptimizer, build_optimizer
from altgrad.watch import Project

ARM = Arm(lr=1e-2, stiffness="ulp")
RECIPE = Recipe.uniform("E3M4", scaling="delayed")
KEY = "E3M4-spacing_unmatched-0-1"
NAMED = {"format": "E3M4", "name": "spacing_unmatched", "seed": 0}


def arm_of(model: nn.Module) -> ArmOptimizer:
    return build_optimizer(model, ARM, reference=True)


def gpt2() -> Any:
    """Return a model of Hugging Face's, without dropout; skips where transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **still, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def tokens(count: int) -> Tensor:
    """Return ``count`` sequences (count, 16) of token numbers, always the same."""
    return torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(1))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 32))
    return quantize_model(model, RECIPE)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of the batch of ``step``."""
    x = torch.randint(32, (64,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(x), x.roll(1))


def rows(root: Path, key: str = KEY) -> list[dict[str, float | None]]:
    """Return a run's history as `make watch` has it."""
    project = Project(root)
    (change,) = (change for change in project.look() if change.cell.key == key)
    return [{"step": row.step, **row.values} for row in change.rows]


def column(root: Path, name: str) -> list[float | None]:
    assert name in HISTORY
    return [row[name] for row in rows(root)]


def monitors(root: Path) -> pd.DataFrame:
    return pd.read_parquet(root / "data/runs" / KEY / "monitors.parquet")


def assert_same_files(parts: Path, whole: Path) -> None:
    """Assert that two runs have left the same history and the same monitors, which looked at steps 1, 3 and 6."""
    assert rows(parts) == rows(whole)
    found = monitors(parts)
    pd.testing.assert_frame_equal(found, monitors(whole))
    assert sorted(set(found["step"])) == [1, 3, 6]
    assert set(found["role"]) == {"input", "weight", "grad", "weight_grad", "update"}


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[float]]:
    """Return what trains a small model, recorded below ``root``, to step ``to``, and returns the losses."""

    def run(
        root: Path | None, *, to: int = 8, steps: int = 8, checkpoint: dict[str, Any] | None = None,
        save: Callable[[dict[str, Any]], None] | None = None, blow_up: int = 0, **settings: Any,
    ) -> list[float]:  # fmt: skip
        model = small()
        optimizer = arm_of(model)
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        began = checkpoint["step"] if checkpoint else 0
        settings = NAMED | {"steps": steps, "tokens_per_step": 64, "resume_step": began or None} | settings
        recorder = Recorder(root, model, optimizer, **settings) if root else None
        losses = []
        for step in range(began + 1, to + 1):
            if recorder:
                recorder.observe(lambda step=step: loss_of(model, step))
            loss = loss_of(model, step) * (torch.inf if step == blow_up else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if recorder:
                recorder.log(loss, val_loss=loss_of(model.eval(), 0) if step % 4 == 0 else None)
                model.train()
            if save and step == 4:
                if recorder:
                    recorder.sync()
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save(torch.load(_saved(states, tmp_path)))
        if recorder:
            recorder.finish() if to == steps else recorder.close()
        return losses

    return run


def _saved(states: dict[str, Any], folder: Path) -> Path:
    torch.save(states, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"
