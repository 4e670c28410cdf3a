"""Models and optimizers of other libraries."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from altgrad.optim import Arm, build_optimizer
from tests.model.stacks.setup import (
    INPUTS,
    Run,
    quantized,
    recipe_of,
    require_same,
)  # fmt: skip


def encoder(recipe: str, run: Run) -> None:
    """`nn.TransformerEncoder` in evaluation: what its layers compute, within 1e-3."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = quantized(recipe, nn.TransformerEncoder(layer, 2)).eval()
    x = INPUTS[0].view(4, 16, 32)
    enabled = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        found = run(model)(x)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = model(x)
            assert (found - expected).norm() < 1e-3 * expected.norm()
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)


def language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


TOKENS = torch.randint(1, 64, (2, 16), generator=torch.Generator().manual_seed(4))


def resized(recipe: str, run: Run) -> None:
    """transformers' `resize_token_embeddings` after quantizing, of a tied head."""
    model, expected = quantized(recipe, language_model()), language_model()
    for m in (model, expected):
        torch.manual_seed(1)
        m.resize_token_embeddings(80, mean_resizing=False)
    with torch.no_grad():
        require_same([run(model)(input_ids=TOKENS).logits], [quantized(recipe, expected)(input_ids=TOKENS).logits])


def saved_head(recipe: str, run: Run) -> None:
    """PEFT's LoRA with `modules_to_save=["lm_head"]`, before quantizing and after."""
    from peft import LoraConfig, get_peft_model

    from altgrad.integrations import peft

    def config() -> Any:
        return LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["lm_head"])

    torch.manual_seed(1)
    one = get_peft_model(quantized(recipe, language_model()), peft.lora_config(config())).eval()
    other = language_model()
    torch.manual_seed(1)
    other = peft.quantize_model(get_peft_model(other, config()), recipe_of(recipe)).eval()
    with torch.no_grad():
        require_same([run(one)(input_ids=TOKENS).logits], [other(input_ids=TOKENS).logits])


def copied_with_optimizer(recipe: str, run: Run) -> None:
    """`copy.deepcopy` of a model together with its optimizer, which then goes on."""
    model = quantized(recipe)
    pairs = [(model, build_optimizer(model, Arm(lr=1e-2, stiffness="ulp")))]
    for _ in range(2):
        for m, optimizer in pairs:
            optimizer.zero_grad()
            run(m)(INPUTS[0]).square().mean().backward()
            optimizer.step()
        pairs = [*pairs, copy.deepcopy(pairs[0])] if len(pairs) == 1 else pairs
    require_same(pairs[0][0].parameters(), pairs[1][0].parameters())


def lora(recipe: str, run: Run) -> None:
    """PEFT's LoRA around quantized layers, whose adapters begin at zero."""
    from peft import LoraConfig, get_peft_model

    from altgrad.integrations.peft import lora_config

    model = run(get_peft_model(quantized(recipe), lora_config(LoraConfig(target_modules=["0", "2"]))))
    expected = quantized(recipe)
    require_same([model(x).detach() for x in INPUTS], [expected(x).detach() for x in INPUTS])
    model(INPUTS[0]).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
