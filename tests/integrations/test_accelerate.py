"""The losses of a loop under Accelerate are those of the loop without it. Oracle: that loop."""

from __future__ import annotations

import pytest

from altgrad.integrations import Recorder
from tests.integrations.conftest import NAMED, arm_of, column, loss_of, small

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")


def test_a_prepared_model_and_arm_train_as_they_are_and_are_recorded(train, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model = small()
    model, optimizer = accelerator.prepare(model, arm_of(model))
    with Recorder(tmp_path, model, optimizer, steps=8, tokens_per_step=64, **NAMED) as run:
        for step in range(1, 9):
            run.observe(lambda step=step: loss_of(model, step))
            loss = loss_of(model, step)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            run.log(loss)
    assert column(tmp_path, "train_loss") == train(None)
