"""How many directions a weight matrix really uses."""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.diagnostics.view import LayerView, singular_values


def stable_rank(view: LayerView) -> float | None:
    """||W||_F^2 / ||W||_2^2: 1 if one direction dominates, the full rank if all are equally strong."""
    squares = view.singular_values.square()
    return (squares.sum() / squares[-1]).item() if squares[-1] > 0 else None


def effective_rank(view: LayerView) -> float | None:
    """exp of the entropy of the singular values divided by their sum (Roy and Vetterli 2007)."""
    return _effective_rank(view.singular_values)


def effective_rank_kept(view: LayerView) -> float | None:
    """Effective rank as a share of that of the initial weights."""
    now, then = effective_rank(view), _effective_rank(singular_values(view.initial))
    return now / then if now and then else None


def _effective_rank(values: Tensor) -> float | None:
    if values[-1] <= 0:
        return None
    return torch.special.entr(values / values.sum()).sum().exp().item()
