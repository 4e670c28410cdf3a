"""From the settings of an arm to a ``torch.optim.Optimizer`` over a model's parameters."""

from __future__ import annotations

import torch
from torch import nn


def build_optimizer(
    model: nn.Module,
    *,
    base: str = "adamw",
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """Return the optimizer of an arm.

    ``adamw`` is Loshchilov & Hutter's decoupled form (ICLR 2019) in torch's fused implementation.
    Only matrices decay: gains of norms and biases have no reason to shrink. A tied parameter is
    updated once. Raises ``ValueError`` for an unknown ``base``.
    """
    if base != "adamw":
        raise ValueError(f"unknown optimizer base {base!r}; known: adamw")
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)
