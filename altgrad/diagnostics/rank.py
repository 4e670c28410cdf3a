"""How many directions a weight matrix really uses."""

from __future__ import annotations

import torch
from torch import Tensor

from altgrad.diagnostics.analysis import WEIGHT, Analysis
from altgrad.diagnostics.view import LayerView, needed, singular_values


def stable_rank(view: LayerView) -> float | None:
    """``None`` for a matrix of zeros."""
    squares = view.singular_values.square()
    return (squares.sum() / squares[-1]).item() if squares[-1] > 0 else None


def effective_rank(view: LayerView) -> float | None:
    """``None`` for a matrix of zeros."""
    return _effective_rank(view.singular_values)


def effective_rank_kept(view: LayerView) -> float | None:
    """``None`` when either matrix is all zeros."""
    now, then = effective_rank(view), _effective_rank(singular_values(needed(view.initial)))
    return now / then if now and then else None


def _effective_rank(values: Tensor) -> float | None:
    if values[-1] <= 0:
        return None
    return torch.special.entr(values / values.sum()).sum().exp().item()


ORDER = 40
ANALYSES = (
    Analysis(stable_rank, WEIGHT),
    Analysis(effective_rank, WEIGHT),
    Analysis(effective_rank_kept, (*WEIGHT, "initial")),
)
