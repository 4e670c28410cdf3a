"""Which rows of a layer a divergence is in: features of a tensor that are not finite, or weights that went far.

A row of a weight (out, in) makes one output feature, of which an incoming gradient (tokens, out) has a column each. The
columns of an input (tokens, in) are input features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

OUTSTANDING = 8.0  # a row stands out that moved that many times as far as the median row of its layer
FEATURES = {"input": "input features", "weight": "output rows", "grad": "output rows"}


def nonfinite_rows(t: Tensor, role: str) -> str:
    """Return which features of ``t`` (its rows for a weight, else its last dimension) have a NaN or an infinity.

    Such as ``output rows 3 to 17 (5 of 128)``; "" if none has.
    """
    bad = ~t.detach().reshape(-1, t.shape[-1]).isfinite()
    return in_words(bad.any(dim=1 if role == "weight" else 0), FEATURES[role])


def outstanding_rows(moved: Mapping[str, Tensor]) -> str | None:
    """Return the layer and the rows that moved farthest beside the others of their layer, None where none stands out.

    Such as ``blocks.0.mlp.up output rows 3 to 17 (5 of 128)``. Rows that did not move are left out of the median.

    Args:
        moved: by how much weights (out, in) changed, by layer. What is not finite stands out nowhere.
    """
    found: tuple[float, str] | None = None
    for layer, change in moved.items():
        norms = torch.linalg.vector_norm(change, dim=1, dtype=torch.float64)
        if not (norms > 0).any():
            continue
        beyond = norms / norms[norms > 0].median()
        largest = beyond.max().item()
        if largest > OUTSTANDING and (found is None or largest > found[0]):
            found = largest, f"{layer} {in_words(beyond > OUTSTANDING, FEATURES['weight'])}"
    return None if found is None else found[1]


def in_words(chosen: Tensor, what: str) -> str:
    """Return where ``chosen``, bool of one dimension, holds: ``output rows 3 to 17 (5 of 128)``, "" if nowhere."""
    places = chosen.nonzero().flatten().tolist()
    if not places:
        return ""
    if len(places) == 1:
        return f"{what.removesuffix('s')} {places[0]} (of {len(chosen)})"
    return f"{what} {places[0]} to {places[-1]} ({len(places)} of {len(chosen)})"
