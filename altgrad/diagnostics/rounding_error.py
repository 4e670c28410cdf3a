"""What rounding to the format does to the weights of a layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from altgrad.diagnostics.analysis import QUANTIZED, Analysis
from altgrad.diagnostics.view import Histogram, LayerView, needed
from altgrad.numerics import ulp

MISALIGNMENT_BINS = 16  # on [0, 1/2]


def sqnr_db(view: LayerView) -> float | None:
    """``None`` if nothing was rounded."""
    return ratio_db(view.scaled, view.on_grid - view.scaled.double())


def misalignment_mean(view: LayerView) -> float:
    """The mean of :func:`misalignment`, without its bins."""
    return _misalignment(view).mean().item()


def misalignment(view: LayerView) -> Histogram:
    """x is the lower edge of a bin on [0, 1/2].

    A flat histogram says that the weights pay no heed to the quantization grid.
    """
    bins = (2 * MISALIGNMENT_BINS * _misalignment(view)).long().clamp_max(MISALIGNMENT_BINS - 1).flatten()
    counts = torch.bincount(bins, minlength=MISALIGNMENT_BINS).double()
    edges = [i / (2 * MISALIGNMENT_BINS) for i in range(MISALIGNMENT_BINS)]
    return Histogram(edges, (counts / counts.sum()).tolist())


def boundary_frac(view: LayerView) -> float:
    """The edge is min(max, 2^16), which the amax is scaled to."""
    return (view.on_grid.abs() >= needed(view.grid).format.scale_target).double().mean().item()


def underflow_frac(view: LayerView) -> float:
    """0 if every weight is zero."""
    nonzero = needed(view.weight) != 0
    lost = nonzero & (view.on_grid == 0)
    return int(lost.sum()) / max(1, int(nonzero.sum()))


def ratio_db(signal: Tensor, noise: Tensor) -> float | None:
    """Return 10 log10 of the ratio of the sums of squares, ``None`` when either is zero."""
    signal_power, noise_power = (t.double().square().sum().item() for t in (signal, noise))
    if not signal_power or not noise_power:
        return None
    return 10 * math.log10(signal_power / noise_power)


def _misalignment(view: LayerView) -> Tensor:
    return (view.scaled.double() - view.on_grid).abs() / ulp(view.scaled, needed(view.grid).format)


ORDER = 30
ANALYSES = (
    Analysis(sqnr_db, QUANTIZED),
    Analysis(misalignment_mean, QUANTIZED),
    Analysis(misalignment, QUANTIZED),
    Analysis(boundary_frac, QUANTIZED),
    Analysis(underflow_frac, QUANTIZED),
)
