"""The losses of a loop under Accelerate are those of the loop without it. Oracle: that loop."""

from __future__ import annotations

import pytest
import torch

from altgrad.integrations import Recorder
from tests.integrations import accelerated
from tests.integrations.conftest import NAMED, arm_of, column, loss_of, small
from tests.model import fully_sharded

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


def test_fsdp2_shards_a_prepared_model_and_arm_with_weights_gathered_as_codes_or_as_they_are(tmp_path, monkeypatch):
    for name, value in fully_sharded.PRODUCTS.items():
        monkeypatch.setenv(name, value)
    found = fully_sharded.run(tmp_path, accelerated.__name__, counts=(2,))[2]
    assert found[False]["losses"] == pytest.approx(accelerated.trained(None, None)["losses"], rel=2e-6)
    assert found[True]["losses"] == found[False]["losses"]
    for a, b in zip(found[True]["weights"], found[False]["weights"], strict=True):
        assert torch.equal(a, b)
