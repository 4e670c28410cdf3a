"""A model that torchtitan's steps convert is the quantized model. Oracle: `quantize_model`.

torchtitan is not installed for it: its steps stand here, as its trainer takes them (model on the meta device, convert,
memory, initial weights, a hook after each optimizer step).
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from altgrad.integrations.torchtitan import QuantizeConverter
from altgrad.model import QuantizedLinear, quantize_model
from tests.integrations.conftest import RECIPE, arm_of, loss_of


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 32))


def initialised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def train(model: nn.Module, hook) -> list[float]:
    optimizer = arm_of(model)
    optimizer.register_step_post_hook(lambda *_: hook())
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_converted_model_trains_as_a_quantized_one():
    converter = QuantizeConverter(RECIPE).build(parallel_dims=None, model_compile_enabled=False)
    with torch.device("meta"):
        model = plain()
    converter.convert(model)
    assert isinstance(model[1], QuantizedLinear)
    initialised(model.to_empty(device="cpu"))
    losses = train(model, lambda: converter.post_optimizer_hook([model]))
    assert losses == train(initialised(quantize_model(plain(), RECIPE)), lambda: None)
    assert [converter.key_filter(), converter.state_dict_transform(), converter.format_adapter()] == [None] * 3


def test_a_configuration_in_the_place_of_a_model_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match="expected a model to quantize, got dict; where torchtitan converts"):
        QuantizeConverter(RECIPE).convert({})
