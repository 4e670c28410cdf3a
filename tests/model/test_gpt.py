"""The transformer is the one that its docstring describes.

Oracles: the same network written out in NumPy and float64, a head and a token at a time; for the initial weights, the
standard error of a standard deviation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import erf
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from altgrad.model import GPT, GPTConfig, Recipe, quantize_model
from altgrad.model import gpt as gpt_module

CONFIG = GPTConfig(vocab_size=31, layers=3, width=12, heads=3, context=10, mlp_ratio=2.5)
TOKENS = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(3))


def scattered(config: GPTConfig = CONFIG) -> GPT:
    """Return a model whose weights, those of the norms too, are large enough for every part to matter."""
    torch.manual_seed(1)
    gpt = GPT(config)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5 + (parameter.ndim == 1))
    return gpt.eval()


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight


def attended(x: np.ndarray, qkv: np.ndarray, out: np.ndarray, heads: int) -> np.ndarray:
    """Return causal attention of one sequence (length, width), a head and a position at a time."""
    length, width = x.shape
    size = width // heads
    query, key, value = (x @ part.T for part in np.split(qkv, 3))
    joined = np.zeros_like(x)
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        for t in range(length):
            scores = key[: t + 1, own] @ query[t, own] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            joined[t, own] = weights @ value[: t + 1, own] / weights.sum()
    return joined @ out.T


def written_out(gpt: GPT, tokens: np.ndarray) -> np.ndarray:
    """Return the logits of one sequence (length,)."""
    w = {name: t.double().numpy() for name, t in gpt.state_dict().items()}
    x = w["tokens.weight"][tokens] + w["positions.weight"][: len(tokens)]
    for i in range(gpt.config.layers):
        name = f"blocks.{i}."
        h = normed(x, w[name + "norm1.weight"])
        x = x + attended(h, w[name + "attn.qkv.weight"], w[name + "attn.out.weight"], gpt.config.heads)
        h = normed(x, w[name + "norm2.weight"]) @ w[name + "mlp.up.weight"].T
        x = x + (0.5 * h * (1 + erf(h / math.sqrt(2)))) @ w[name + "mlp.down.weight"].T
    return normed(x, w["norm.weight"]) @ w["tokens.weight"].T


@pytest.mark.parametrize("short", [True, False])
def test_the_model_computes_what_its_definition_says(monkeypatch, short: bool) -> None:
    monkeypatch.setattr(gpt_module, "SHORT_CONTEXT", 128 if short else 0)
    gpt = scattered()
    expected = np.stack([written_out(gpt, sequence.numpy()) for sequence in TOKENS])
    np.testing.assert_allclose(gpt(TOKENS).detach().numpy(), expected, rtol=0, atol=2e-4 * np.abs(expected).max())


def test_sizes_are_those_of_the_configuration() -> None:
    shapes = {name: tuple(p.shape) for name, p in GPT(CONFIG).named_parameters() if not name.startswith("blocks.")}
    assert shapes == {"tokens.weight": (31, 12), "positions.weight": (10, 12), "norm.weight": (12,)}
    block = {name: tuple(p.shape) for name, p in GPT(CONFIG).blocks[2].named_parameters()}
    assert block == {
        "norm1.weight": (12,), "attn.qkv.weight": (36, 12), "attn.out.weight": (12, 12),
        "norm2.weight": (12,), "mlp.up.weight": (30, 12), "mlp.down.weight": (12, 30),
    }  # fmt: skip


@pytest.mark.parametrize("layers", [1, 6])
def test_initial_weights_are_normal_and_smaller_where_they_add_to_the_residual(layers: int) -> None:
    """0.02, and 0.02 / sqrt(2 layers) for the last matrix of each branch: as many as add to one another."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=512, layers=layers, width=64, heads=2, context=256))
    for name, parameter in gpt.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = 0.02 / math.sqrt(2 * layers) if name.endswith(("attn.out.weight", "mlp.down.weight")) else 0.02
        n = parameter.numel()
        assert parameter.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
        assert abs(parameter.mean().item()) < 5 * std / math.sqrt(n), name
        kurtosis = ((parameter - parameter.mean()) ** 4).mean() / parameter.var() ** 2
        assert kurtosis.item() == pytest.approx(3, abs=5 * math.sqrt(24 / n)), name


PLACES = {
    "embedding": lambda gpt: [gpt.dropout],
    "branches": lambda gpt: [block.dropout for block in gpt.blocks],
    "attention": lambda gpt: [block.attn for block in gpt.blocks],
}


def dropping(place: str, p: float = 0.5) -> GPT:
    """Return a model that drops in one of its places alone."""
    gpt = scattered()
    for part in PLACES[place](gpt):
        if isinstance(part, nn.Dropout):
            part.p = p
        else:
            part.dropout = p
    return gpt


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("short", [True, False])
def test_dropout_acts_in_every_place_in_training_and_in_none_after_it(monkeypatch, place: str, short: bool) -> None:
    monkeypatch.setattr(gpt_module, "SHORT_CONTEXT", 128 if short else 0)
    whole = scattered()(TOKENS)
    gpt = dropping(place)
    assert torch.equal(gpt(TOKENS), whole)
    gpt.train()
    torch.manual_seed(0)
    assert not torch.allclose(gpt(TOKENS), whole)


def test_everything_dropped_leaves_the_path_beside_the_branches() -> None:
    gpt = dropping("branches", 1.0).train()
    x = gpt.tokens(TOKENS) + gpt.positions(torch.arange(TOKENS.shape[1]))
    torch.testing.assert_close(gpt(TOKENS), gpt.head(gpt.norm(x)))


def test_the_configured_dropout_reaches_every_place() -> None:
    config = GPTConfig(vocab_size=31, layers=2, width=12, heads=3, context=10, dropout=0.25)
    gpt = GPT(config)
    parts = [part for find in PLACES.values() for part in find(gpt)]
    assert [part.p if isinstance(part, nn.Dropout) else part.dropout for part in parts] == [0.25] * 5


def test_the_loss_is_in_float32_whatever_is_computed_in() -> None:
    gpt = scattered()
    with torch.autocast("cpu", torch.bfloat16):
        assert gpt(TOKENS).dtype == torch.bfloat16
        assert gpt(TOKENS, TOKENS).dtype == torch.float32
    gpt.bfloat16()
    logits = gpt(TOKENS)
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), TOKENS.flatten())
    assert logits.dtype == torch.bfloat16 and gpt(TOKENS, TOKENS).dtype == torch.float32
    torch.testing.assert_close(gpt(TOKENS, TOKENS).double(), loss, rtol=1e-5, atol=0)


def test_operations_are_those_that_torch_counts() -> None:
    config = GPTConfig(vocab_size=31, layers=3, width=12, heads=3, context=7)
    model = quantize_model(GPT(config), Recipe.uniform("E4M3"))
    with FlopCounterMode(display=False) as counter:
        model(TOKENS, TOKENS).backward()
    assert counter.get_total_flops() == TOKENS.numel() * model.flops_per_token()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_contexts_attend_as_torch_does_from_plain_products(dtype):
    q, k, v = torch.randn(3, 2, 4, 12, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(gpt_module._plain_attention(q, k, v, gpt_module._causal_mask(torch.arange(12)), 0.0), expected)


def test_an_untrained_model_is_as_unsure_as_a_uniform_guess():
    torch.manual_seed(0)
    loss = GPT(CONFIG)(TOKENS, TOKENS.roll(1))
    assert abs(loss.item() - math.log(31)) < 0.05
