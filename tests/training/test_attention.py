"""The entropy of attention. Oracles: uniform and one-hot attention by hand, the model's own in float64."""

from __future__ import annotations

import math

import pytest
import torch

from altgrad.model import GPT, GPTConfig
from altgrad.training.monitor import SEQUENCES, TensorMonitor, attention_statistics, head_entropies


def test_equal_scores_have_the_entropy_of_as_many_tokens_and_one_token_has_none():
    length = 6
    uniform = sum(math.log(t + 1) for t in range(length)) / length
    q = torch.zeros(2, 2, length, 4)
    k = torch.randn(2, 2, length, 4, generator=torch.Generator().manual_seed(0))
    q[:, 1], k[:, 1] = 0.0, 0.0
    q[:, 1, :, 0] = 1e4
    k[:, 1, :, 0] = torch.arange(6.0)  # the last token that may be seen takes everything
    assert head_entropies(q, k).tolist() == pytest.approx([uniform, 0.0], abs=1e-6)
    found = attention_statistics(q, k)
    assert found == {"attention_entropy": pytest.approx(uniform / 2), "attention_low_heads": 1.0}


def test_it_is_of_the_attention_that_the_block_computes():
    """By plain softmax in float64, from the projection's own output."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=50, layers=2, width=16, heads=2, context=8))
    for p in model.parameters():
        p.data *= 20
    tokens = torch.randint(0, 50, (SEQUENCES + 2, 8))
    kept = {}
    for i, block in enumerate(model.blocks):
        block.attn.qkv.register_forward_hook(lambda _, __, output, i=i: kept.__setitem__(i, output.detach().double()))
    blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks)}
    rows = TensorMonitor(model, blocks).observe(1, lambda: model(tokens, tokens), {"outputs"})
    found = {(row.layer, row.metric): row.value for row in rows}
    for i, qkv in kept.items():
        q, k = (qkv[:SEQUENCES, :, 16 * part : 16 * part + 16].unflatten(-1, (2, 8)) for part in (0, 1))
        entropies = []
        for sequence in range(SEQUENCES):
            for head in range(2):
                for t in range(8):
                    scores = k[sequence, : t + 1, head] @ q[sequence, t, head] / math.sqrt(8)
                    p = (scores - scores.max()).exp()
                    p = p / p.sum()
                    entropies.append(-(p * p.clamp_min(1e-300).log()).sum().item())
        assert found[f"blocks.{i}", "attention_entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
        assert found[f"blocks.{i}", "attention_low_heads"] in (0.0, 1.0, 2.0)
