"""An analysis: how one metric is computed, what it takes, and what several compare two fields over a weight by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from altgrad.diagnostics.view import Histogram, LayerView
from altgrad.metrics import METRICS, Metric
from altgrad.numerics import permutation

SEED = 0
WEIGHT = ("weight",)
QUANTIZED = ("weight", "grid")
GEOMETRY = ("weight", "geometry")
GRADIENTS = ("grad_quantized", "grad_float")


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


class Analysis(NamedTuple):
    """How one metric is computed.

    ``compute`` takes a :class:`LayerView` and returns a number, a :class:`Histogram`, or ``None`` where the metric has
    no value. ``needs`` names attributes of the view: it is called only when all of them are there and finite. ``row``
    says what it is, unless ``altgrad.metrics`` has a row of that name.
    """

    compute: Callable[[LayerView], float | Histogram | None]
    needs: tuple[str, ...]
    row: Metric | None = None

    @classmethod
    def own(
        cls, compute: Callable[[LayerView], float | Histogram | None], needs: tuple[str, ...], unit: str,
        definition: str, **row: Any,
    ) -> Analysis:  # fmt: skip
        """Return an analysis with a `Metric` of its own, called like the function; ``row`` are that one's fields."""
        return cls(compute, needs, Metric(compute.__name__, unit, definition, **row))

    @property
    def name(self) -> str:
        """The metric's name in files and reports: that of the function."""
        return self.compute.__name__

    @property
    def metric(self) -> Metric:
        return METRICS[self.name] if self.row is None else self.row
