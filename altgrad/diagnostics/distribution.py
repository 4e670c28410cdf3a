"""Where the weights lie, in bins that can be compared between formats and within one, under the format's range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from altgrad.diagnostics.analysis import GEOMETRY, QUANTIZED, WEIGHT, Analysis
from altgrad.diagnostics.view import Histogram, LayerView, needed

BINS_PER_BINADE = 4
LOWEST_LOG2, HIGHEST_LOG2 = -40, 8  # the outermost bins take what lies beyond


def log2_magnitude(view: LayerView) -> Histogram | None:
    """x is a bin's lower edge. ``None`` if every weight is zero.

    The bins are the same for every layer, run and format, so two histograms can be compared bin by
    bin, by Kullback-Leibler divergence for one.
    """
    weight = needed(view.weight)
    magnitude = weight[weight != 0].abs().double()
    if not len(magnitude):
        return None
    bins = (BINS_PER_BINADE * magnitude.log2()).floor()
    bins = bins.clamp(BINS_PER_BINADE * LOWEST_LOG2, BINS_PER_BINADE * HIGHEST_LOG2 - 1)
    x, share = _shares(bins)
    return Histogram([edge / BINS_PER_BINADE for edge in x], share)


def binade_usage(view: LayerView) -> Histogram:
    """x is the binade's exponent.

    The spacing stops shrinking below the smallest normal value, 2^emin, so all that is below it is
    one bin, at emin - 1.
    """
    fmt = needed(view.grid).format
    # frexp's exponent is that of the next binade up: 1 = 0.5 * 2^1.
    exponent = torch.frexp(view.scaled.abs()).exponent - 1
    exponent = torch.where(view.scaled == 0, fmt.emin - 1, exponent).clamp(fmt.emin - 1, fmt.emax)
    return Histogram(*_shares(exponent))


def range_low_log2(view: LayerView) -> float:
    """The left edge of `log2_magnitude`'s weights that have a value of their own."""
    return _edge(view, needed(view.geometry).format.smallest)


def range_high_log2(view: LayerView) -> float:
    """The right edge: what lies beyond it saturates."""
    return _edge(view, needed(view.geometry).format.max)


def _edge(view: LayerView, value: float) -> float:
    return math.log2(value / needed(view.geometry).scale.double().median().item())


def _shares(bins: Tensor) -> tuple[list[float], list[float]]:
    """Return the bins that occur, ascending, and the share of each."""
    found, counts = bins.unique(sorted=True, return_counts=True)
    return found.double().tolist(), (counts.double() / bins.numel()).tolist()


ORDER = 10
ANALYSES = (
    Analysis(log2_magnitude, WEIGHT),
    Analysis(binade_usage, QUANTIZED),
    Analysis.own(
        range_low_log2, GEOMETRY, "log2",
        "log2 of the smallest magnitude above 0 that the format has at the layer's scale (the median of several).",
        offline="weight",
    ),
    Analysis.own(
        range_high_log2, GEOMETRY, "log2",
        "log2 of the largest magnitude that the format has at the layer's scale.",
        offline="weight",
    ),
)  # fmt: skip
