"""The losses of a `Trainer` are those of a plain loop, and a run that it resumes is the run that it would have been.

Oracle: a loop of a few lines over the batches that the Trainer took.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from altgrad.config.schema import MonitorSettings
from altgrad.model import Recipe, quantize_model
from altgrad.watch import DIAGNOSED, Project
from tests.integrations.conftest import KEY, NAMED, RECIPE, arm_of, assert_same_files, column, gpt2, rows, tokens

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from altgrad.integrations.huggingface import RecorderCallback  # noqa: E402 - skipped above without its framework


def run(root: Path, *, recipe: Recipe = RECIPE, resume: str | None = None, recorded: bool = True, **settings: Any):
    """Train by a Trainer; return it and the batches that its model was trained on."""
    model = quantize_model(gpt2(), recipe)
    settings = {"max_steps": 6, "save_steps": 4, "eval_steps": 3, "logging_steps": 1} | settings
    arguments = transformers.TrainingArguments(
        str(root / "trainer"), per_device_train_batch_size=4, eval_strategy="steps", report_to=[], use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="constant", **settings,
    )  # fmt: skip
    data = [{"input_ids": sequence, "labels": sequence} for sequence in tokens(64)]
    callback = RecorderCallback(root, tokens_per_step=64, when=MonitorSettings(every=3), **NAMED)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:8], optimizers=(arm_of(model), None),
        callbacks=[callback] if recorded else [],
    )  # fmt: skip
    batches: list[torch.Tensor] = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *more: (batches.append(inputs["input_ids"]), step(
        model, inputs, *more))[1]  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, batches


def plain(batches: list[torch.Tensor], *, accumulate: int = 1, bf16: bool = False) -> list[float]:
    """Return the losses of a loop over the same batches."""
    model = quantize_model(gpt2(), RECIPE)
    optimizer = arm_of(model)
    losses = []
    for first in range(0, len(batches), accumulate):
        loss = torch.zeros(())
        optimizer.zero_grad()
        for batch in batches[first : first + accumulate]:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                # The Trainer divides by the number of labels, one more in each sequence than there are predictions.
                count = accumulate * batch.numel()
                part = model(input_ids=batch, labels=batch, num_items_in_batch=count).loss
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("accumulate", "bf16"), [(1, False), (2, True)])
def test_the_losses_are_those_of_a_plain_loop_and_watch_sees_what_the_trainer_logs(accumulate, bf16, tmp_path):
    trainer, batches = run(tmp_path, gradient_accumulation_steps=accumulate, bf16=bf16)
    assert len(batches) == 6 * accumulate
    assert column(tmp_path, "train_loss") == plain(batches, accumulate=accumulate, bf16=bf16)
    project = Project(tmp_path)
    project.look()
    assert (project.cells[KEY].state, project.cells[KEY].step) == (DIAGNOSED, 6)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name, theirs in (("train_loss", "loss"), ("grad_norm", "grad_norm"), ("lr", "learning_rate")):
        assert column(tmp_path, name) == [entry[theirs] for entry in logged]
    evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert {row["step"]: row["val_loss"] for row in rows(tmp_path) if row["val_loss"]} == evaluated
    assert set(evaluated) == {3, 6}


def test_a_resumed_run_has_the_files_of_one_that_was_not_interrupted(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    shutil.copytree(whole, parts)
    resumed, batches = run(parts, resume=str(parts / "trainer/checkpoint-4"))
    assert len(batches) == 2 and resumed.state.global_step == 6
    assert_same_files(parts, whole)
