"""How widely the heads of a block attend: the entropy of their attention, from the queries and keys of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

SEQUENCES = 4  # the first of a batch: each has an entropy per head and position, and the mean is over all
LOW = 1.0  # nats: a head below it attends to fewer than e = 2.7 tokens


def attention_statistics(q: Tensor, k: Tensor) -> dict[str, float]:
    """Return the mean entropy of causal attention in nats, and the number of heads whose own is below `LOW`.

    Args:
        q: queries (batch, heads, length, width of a head), of which `SEQUENCES` are looked at.
        k: keys, alike.
    """
    heads = head_entropies(q[:SEQUENCES].detach(), k[:SEQUENCES].detach())
    return {"attention_entropy": heads.mean().item(), "attention_low_heads": float((heads < LOW).sum())}


def head_entropies(q: Tensor, k: Tensor) -> Tensor:
    """Return the mean of −Σ p ln p over sequences and positions, for each head: float32 (heads,)."""
    with torch.autocast(q.device.type, enabled=False):
        length, width = q.shape[-2:]
        scores = q.float() @ k.float().transpose(-2, -1) * width**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    p = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    return torch.special.entr(p).sum(dim=-1).mean(dim=(0, 2))
