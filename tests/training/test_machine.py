"""What a compiled model still notices, since most of what torch would check before each call is not checked."""

from __future__ import annotations

import torch

from altgrad.model import GPT, GPTConfig, Recipe, quantize_model
from altgrad.model.quantizer import Quantizer
from altgrad.training.machine import compile_model

CONFIG = GPTConfig(vocab_size=61, layers=1, width=16, heads=2, context=8)
TOKENS = torch.randint(0, 61, (2, 4, 8), generator=torch.Generator().manual_seed(3))


def model(**settings: str) -> GPT:
    torch.manual_seed(0)
    return quantize_model(GPT(CONFIG), Recipe.uniform("E4M3", **settings))


def histories(gpt: GPT) -> torch.Tensor:
    return torch.stack([module.history for module in gpt.modules() if isinstance(module, Quantizer)])


def test_evaluation_leaves_the_scales_of_a_compiled_model_alone():
    gpt = model(scaling="delayed")
    compiled = compile_model(gpt)
    compiled(*TOKENS).backward()
    compiled(*TOKENS).backward()
    trained = histories(gpt).clone()
    gpt.eval()
    compiled(*TOKENS)
    with torch.no_grad():
        compiled(*TOKENS)
    assert torch.equal(histories(gpt), trained)
    gpt.train()
    compiled(*TOKENS)
    assert not torch.equal(histories(gpt), trained)


def test_models_of_other_recipes_and_other_shapes_get_graphs_of_their_own():
    per_tensor, per_row = model(), model(granularity="row")
    compiled = compile_model(per_tensor)
    losses = [compiled(*TOKENS), compile_model(per_row)(*TOKENS), compiled(*TOKENS[:, :2])]
    expected = [per_tensor(*TOKENS), per_row(*TOKENS), per_tensor(*TOKENS[:, :2])]
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert losses[0] != losses[1]
