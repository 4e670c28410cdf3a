"""The losses of Lightning's Trainer are those of a plain loop, and a run that it resumes is what it would have been.

Oracle: a loop of a few lines over the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from altgrad.config.schema import MonitorSettings
from altgrad.model import QuantizedLinear, quantize_model
from altgrad.watch import DIAGNOSED, Project
from tests.integrations.conftest import KEY, NAMED, RECIPE, arm_of, assert_same_files, column, rows, tokens

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from altgrad.integrations.lightning import QuantizeCallback, RecorderCallback  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*GPU.*", "ignore:.*isinstance.*")


class Language(pl.LightningModule):
    """A module of a stranger's, which knows of an arm and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 64))
        self.logged = 0

    def loss(self, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def log(self, *arguments: Any, **settings: Any) -> None:
        self.logged += self.training
        super().log(*arguments, **settings)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return arm_of(self)


class Batches:
    """Batches of four sequences in order, which know how far they are, as Lightning asks of what it resumes."""

    def __init__(self, data: Tensor) -> None:
        self.batches, self.next = data.split(4), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < len(self):
            self.next += 1
            yield self.batches[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def run(
    root: Path, *, steps: int = 6, resume: Path | None = None, recorded: bool = True, accumulate: int = 1,
    clip: float | None = 1.0,
) -> Language:
    module = Language()
    recorder = RecorderCallback(root, tokens_per_step=60, when=MonitorSettings(every=3), **NAMED)
    checkpoint = pl.callbacks.ModelCheckpoint(root / "checkpoints", every_n_train_steps=4, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=1, accelerator="cpu", precision="bf16-mixed", logger=False, log_every_n_steps=1,
        callbacks=[QuantizeCallback(RECIPE), *([recorder] if recorded else []), checkpoint], enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=3 * accumulate, gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    data = tokens(64)
    trainer.fit(module, Batches(data), DataLoader(data[:8], batch_size=8), ckpt_path=resume)
    return module


def plain(accumulate: int = 1) -> list[float]:
    """Return the losses of a loop over the same batches."""
    module = quantize_model(Language(), RECIPE)
    optimizer = arm_of(module)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        total = 0.0
        for batch in tokens(64)[4 * accumulate * step :][: 4 * accumulate].split(4):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = module.loss(batch) / accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_losses_are_those_of_a_plain_loop(accumulate, tmp_path):
    module = run(tmp_path, accumulate=accumulate)
    assert column(tmp_path, "train_loss") == plain(accumulate)
    assert [row["step"] for row in rows(tmp_path) if row["val_loss"]] == [3, 6]
    assert module.logged == 6 * accumulate, "a pass that the monitors take logs nothing"
    assert isinstance(module.layers[1], QuantizedLinear)


def test_a_resumed_run_has_the_files_of_one_that_was_not_interrupted(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    run(parts, steps=5)
    (saved,) = (parts / "checkpoints").glob("*step=4*")
    run(parts, resume=saved)
    assert_same_files(parts, whole)
    project = Project(parts)
    project.look()
    assert (project.cells[KEY].state, project.cells[KEY].step) == (DIAGNOSED, 6)


def test_a_module_with_manual_optimization_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(Language, "automatic_optimization", False)
    with pytest.raises(ValueError, match="needs automatic optimization"):
        run(tmp_path, clip=None)
