"""Attention's two products, quantized in transformers' models. Oracle: transformers' own attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, LlamaConfig, Qwen3Config

from altgrad.config.recipe import Recipe, Rule
from altgrad.model import account, quantize_model, unquantize_model
from altgrad.model.quantized.attention import Product, QuantizedProduct
from tests.model.test_attention import TOKENS, layer_recipe, recipe

SIZE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
NO_DROPOUT = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
IDS = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "llama": LlamaConfig(**IDS, **SIZE),
    "qwen3, windows": Qwen3Config(**IDS, **SIZE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "gpt2": GPT2Config(**IDS, **NO_DROPOUT, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "gpt-oss, sinks": GptOssConfig(**IDS, **SIZE, **EXPERTS, sliding_window=5, rope_scaling=None),
}  # fmt: skip


def pretrained(name: str, implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation=implementation)
    for key, p in model.named_parameters():  # scores far from even, and sinks that are not all alike
        if "sinks" in key or p.ndim > 1:
            nn.init.normal_(p, std=0.3)
    return model


def prefix(name: str) -> str:
    return "transformer.h.*.attn" if name == "gpt2" else "model.layers.*.self_attn"


def losses(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of two sequences, the second of which is padded at its beginning."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, :6] = 0
    labels = TOKENS[:2].masked_fill(mask == 0, -100)
    model.zero_grad()
    loss = model(TOKENS[:2], attention_mask=mask, labels=labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_models_compute_their_own_attention_in_fine_formats(name: str, implementation: str) -> None:
    """Oracle: eager attention of transformers. Formats of 11 bits differ from it by their roundings alone."""
    if "gpt-oss" in name and implementation == "sdpa":
        pytest.skip("GPT-OSS has no sdpa")
    expected, gradients = losses(pretrained(name))
    model = pretrained(name, implementation)
    before = losses(model)[0]
    fine = {role: {"format": "E5M10", "granularity": "head"} for role in ("input", "weight", "grad")}
    rules = [Rule(layers=f"{prefix(name)}.{product}", **fine) for product in ("scores", "values")]
    quantize_model(model, Recipe(rules=rules))
    assert len(account(model).products) == 4 and model.config._attn_implementation == "altgrad"
    loss, found = losses(model)
    assert 0 < abs(loss - expected).item() < 2e-3
    for key, grad in gradients.items():
        assert (found[key] - grad).norm() < 2e-2 * grad.norm() + 1e-6, key
    unquantize_model(model)
    assert model.config._attn_implementation == implementation and torch.equal(losses(model)[0], before)
    assert not any(isinstance(module, Product | QuantizedProduct) for module in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_models_have_attentions_products_quantized(name: str) -> None:
    """The first layer's rule alone leaves the second one plain; a coarse format shows."""
    plain, _ = losses(pretrained(name))
    model = pretrained(name)
    one = prefix(name).replace("*", "0")
    quantize_model(model, Recipe(rules=[layer_recipe("E4M3, E5M2").on(f"{one}.values")]))
    assert [*account(model).products] == [f"{one}.values"]
    loss, gradients = losses(model)
    assert 1e-5 < abs(loss - plain).item() < 0.3 and all(grad.isfinite().all() for grad in gradients.values())


def test_heads_share_no_scale_and_grouped_keys_are_those_of_their_queries() -> None:
    model = quantize_model(pretrained("llama"), recipe("head", prefix="model.layers.*.self_attn"))
    loss, _ = losses(model)
    assert loss.isfinite()
    generated = model.eval().generate(TOKENS[:1, :4], max_new_tokens=4, do_sample=False)
    assert generated.shape == (1, 8)


def test_models_with_an_attention_of_their_own_are_refused_by_name() -> None:
    from transformers import BloomConfig, BloomForCausalLM, GraniteSWAConfig

    model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="BloomForCausalLM has no attention that goes through the"):
        quantize_model(model, recipe(prefix="transformer.h.*.self_attention"))
    assert not hasattr(model.transformer.h[0].self_attention, "scores")
    sinks_by_logsumexp = AutoModelForCausalLM.from_config(GraniteSWAConfig(**IDS, **SIZE))
    with pytest.raises(ValueError, match="GraniteSWAAttention has an eager_attention_forward that uses logsumexp, sig"):
        quantize_model(sinks_by_logsumexp, recipe(prefix="model.layers.0.self_attn"))
