"""What rounding to the format does to the weights of a layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from altgrad.diagnostics.view import Histogram, LayerView
from altgrad.numerics import scale_target, ulp

MISALIGNMENT_BINS = 16  # on [0, 1/2]


def sqnr_db(view: LayerView) -> float | None:
    """Signal to quantization noise, 10 log10(sum w^2 / sum (w - q(w))^2); ``None`` if nothing was rounded."""
    return ratio_db(view.scaled, view.on_grid - view.scaled.double())


def misalignment_mean(view: LayerView) -> float:
    """Mean distance of a weight from its rounded value, in local spacings; 1/4 if weights ignore the grid."""
    return _misalignment(view).mean().item()


def misalignment(view: LayerView) -> Histogram:
    """Share of the weights by |w - q(w)| / ulp(w), in 16 bins on [0, 1/2]; x is a bin's lower edge.

    A flat histogram says that the weights pay no heed to the grid.
    """
    bins = (2 * MISALIGNMENT_BINS * _misalignment(view)).long().clamp_max(MISALIGNMENT_BINS - 1).flatten()
    counts = torch.bincount(bins, minlength=MISALIGNMENT_BINS).double()
    edges = [i / (2 * MISALIGNMENT_BINS) for i in range(MISALIGNMENT_BINS)]
    return Histogram(edges, (counts / counts.sum()).tolist())


def boundary_frac(view: LayerView) -> float:
    """Share of the weights at the edge of the range that scaling uses, |q(w * scale)| >= min(max, 2^16)."""
    return (view.on_grid.abs() >= scale_target(view.grid.format)).double().mean().item()


def underflow_frac(view: LayerView) -> float:
    """Share of the non-zero weights that round to zero; 0 if every weight is zero."""
    nonzero = view.weight != 0
    lost = nonzero & (view.on_grid == 0)
    return int(lost.sum()) / max(1, int(nonzero.sum()))


def ratio_db(signal: Tensor, noise: Tensor) -> float | None:
    """Return 10 log10 of the ratio of the sums of squares, ``None`` when either is zero."""
    signal_power, noise_power = (t.double().square().sum().item() for t in (signal, noise))
    if not signal_power or not noise_power:
        return None
    return 10 * math.log10(signal_power / noise_power)


def _misalignment(view: LayerView) -> Tensor:
    return (view.scaled.double() - view.on_grid).abs() / ulp(view.scaled, view.grid.format)
