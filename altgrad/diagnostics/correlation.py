"""How alike two fields over a weight are: cosine, rank correlation and their control, a shuffle; a ratio in dB."""

from __future__ import annotations

import math

import pandas as pd
import torch
from torch import Tensor

from altgrad.numerics import permutation

SEED = 0


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Return the cosine of two tensors of one shape, ``None`` when either is zero."""
    a, b = a.double().flatten(), b.double().flatten()
    norms = (a.norm() * b.norm()).item()
    return (a @ b).item() / norms if norms else None


def ratio_db(signal: Tensor, noise: Tensor) -> float | None:
    """Return 10 log10 of the ratio of the sums of squares, ``None`` when either is zero."""
    powers = [t.double().square().sum().item() for t in (signal, noise)]
    return 10 * math.log10(powers[0] / powers[1]) if all(powers) else None


def shuffled(t: Tensor) -> Tensor:
    """Return the elements of ``t`` in another order, always the same one: its histogram without its places."""
    return t.flatten()[permutation(t.numel(), SEED, 0)].view_as(t)


def spearman(a: Tensor, b: Tensor) -> float | None:
    """Return Spearman's rank correlation of two tensors of one shape, ``None`` when either is constant.

    Ties, of which stiffness has many, share the mean of their ranks.
    """
    ranks = [torch.from_numpy(pd.Series(t.double().flatten().numpy()).rank().to_numpy(copy=True)) for t in (a, b)]
    return cosine(*(rank - rank.mean() for rank in ranks))
