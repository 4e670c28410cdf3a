"""The metrics of a layer's weights (role ``weight``), computed from the files of a run.

They measure the distribution of the weights over magnitudes, the codes in use and the entropy of each bit, and the
rounding error. They also measure the stiffness (the distance between representable values around each weight), the rank
of the matrix, and the distance from the initial weights.
"""

import math

import numpy as np
import torch
from torch import Tensor

from altgrad.diagnostics.analysis import (
    GEOMETRY,
    QUANTIZED,
    WEIGHT,
    Analysis,
    Histogram,
    LayerView,
    entropy,
    needed,
    ratio_db,
    singular_values,
)
from altgrad.metrics import mean
from altgrad.numerics import rung, ulp

BINS_PER_BINADE = 4
LOWEST_LOG2, HIGHEST_LOG2 = -40, 8  # the outermost bins take what lies beyond
WIDEST_SHOWN = 8  # bits; a wider format has about as many codes as a layer has weights
MISALIGNMENT_BINS = 16  # on [0, 1/2]


def log2_magnitude(view: LayerView) -> Histogram | None:
    """Return the share of non-zero weights by log2|w|; x is a bin's lower edge. ``None`` if every weight is zero.

    The bins are the same for every layer, run and format, so two histograms can be compared bin by bin.
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
    """Return the share of weights by binade; x is the exponent, emin - 1 for all below the smallest normal value."""
    fmt = needed(view.grid).format
    # frexp returns the exponent of the next binade up: 1 = 0.5 * 2^1.
    exponent = torch.frexp(view.scaled.abs()).exponent - 1
    exponent = torch.where(view.scaled == 0, fmt.emin - 1, exponent).clamp(fmt.emin - 1, fmt.emax)
    return Histogram(*_shares(exponent))


def range_low_log2(view: LayerView) -> float:
    """Return log2 of the format's smallest positive value over the layer's median scale."""
    return _edge(view, needed(view.geometry).format.smallest)


def range_high_log2(view: LayerView) -> float:
    """Return log2 of the format's largest value over the layer's median scale; larger weights saturate."""
    return _edge(view, needed(view.geometry).format.max)


def _edge(view: LayerView, value: float) -> float:
    return math.log2(value / needed(view.geometry).scale.double().median().item())


def _shares(bins: Tensor) -> tuple[list[float], list[float]]:
    found, counts = bins.unique(sorted=True, return_counts=True)
    return found.double().tolist(), (counts.double() / bins.numel()).tolist()


def code_usage(view: LayerView) -> Histogram | None:
    """Return the share of weights by rung x (position on the number line); ``None`` for formats of over 8 bits."""
    if needed(view.grid).format.bits > WIDEST_SHOWN:
        return None
    rungs, counts = view.rung_counts
    return Histogram(rungs.tolist(), (counts / counts.sum()).tolist())


def code_used_frac(view: LayerView) -> float:
    """Return the share of the format's values that occur among the weights; +0 and -0 are one value."""
    rungs, _ = view.rung_counts
    return len(rungs) / len(needed(view.grid).format.values)


def code_entropy(view: LayerView) -> float:
    """Return the entropy in bits of the weights over the format's values: 0 if all weights share one value."""
    return entropy(view.rung_counts[1])


def bit_activity(view: LayerView) -> Histogram:
    """Return the entropy of each bit of the code; x is the bit, 0 the lowest of the mantissa, the last the sign.

    The entropy is 1 for a bit that is set in half of the weights, 0 for a bit that is the same in all of them.
    """
    counts = view.code_counts
    codes = np.arange(len(counts))
    bits = range(needed(view.grid).format.bits)
    ones = [counts[(codes >> bit) & 1 == 1].sum() for bit in bits]
    return Histogram(list(bits), [entropy(np.array([one, counts.sum() - one])) for one in ones])


def code_stale_frac(view: LayerView) -> float:
    """Return the share of weights with the code of the previous snapshot, each snapshot quantized at its own scale."""
    now = needed(view.grid).rungs(needed(view.weight))
    before = needed(view.previous_grid).rungs(needed(view.previous))
    return (now == before).double().mean().item()


def sqnr_db(view: LayerView) -> float | None:
    """Return the SQNR of the weights in dB; ``None`` if rounding changes none, or all are zero."""
    return ratio_db(view.scaled, view.on_grid - view.scaled.double())


def misalignment_mean(view: LayerView) -> float:
    """Return the mean distance from a weight to its rounded value, in ulp."""
    return _misalignment(view).mean().item()


def misalignment(view: LayerView) -> Histogram:
    """Return the share of weights by distance to the rounded value in ulp; x is a bin's lower edge in [0, 1/2].

    The histogram is flat if the weights ignore the quantization grid.
    """
    bins = (2 * MISALIGNMENT_BINS * _misalignment(view)).long().clamp_max(MISALIGNMENT_BINS - 1).flatten()
    counts = torch.bincount(bins, minlength=MISALIGNMENT_BINS).double()
    edges = [i / (2 * MISALIGNMENT_BINS) for i in range(MISALIGNMENT_BINS)]
    return Histogram(edges, (counts / counts.sum()).tolist())


def boundary_frac(view: LayerView) -> float:
    """Return the share of weights that round to the largest value, or to min(max, 2^16) if scaled there, or beyond."""
    return (view.on_grid.abs() >= needed(view.grid).format.top).double().mean().item()


def underflow_frac(view: LayerView) -> float:
    """Return the share of the non-zero weights that round to zero; 0 if every weight is zero."""
    nonzero = needed(view.weight) != 0
    lost = nonzero & (view.on_grid == 0)
    return int(lost.sum()) / max(1, int(nonzero.sum()))


def _misalignment(view: LayerView) -> Tensor:
    return (view.scaled.double() - view.on_grid).abs() / ulp(view.scaled, needed(view.grid).format)


def stiffness_field(view: LayerView) -> Histogram:
    """Return the share of weights by binade of their stiffness S; x is floor(log2 S)."""
    found, counts = _binades(view)
    return Histogram(found.tolist(), (counts / counts.sum()).tolist())


def stiffness_entropy(view: LayerView) -> float:
    """Return the entropy in bits of the weights over binades of S; 0 if S is the same for all, as in E0M7."""
    return entropy(_binades(view)[1])


def stiffness_spread(view: LayerView) -> float:
    """Return the standard deviation of log2 S; 0 where all weights have one stiffness."""
    return view.stiffness.log2().std(correction=0).item()


def _binades(view: LayerView) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(np.floor(np.log2(view.stiffness.double().numpy())), return_counts=True)


def stable_rank(view: LayerView) -> float | None:
    """Return the sum of squared singular values over the largest square; ``None`` for a matrix of zeros."""
    squares = view.singular_values.square()
    return (squares.sum() / squares[-1]).item() if squares[-1] > 0 else None


def effective_rank(view: LayerView) -> float | None:
    """Return exp of the entropy of the normalized singular values; ``None`` for a matrix of zeros."""
    return _effective_rank(view.singular_values)


def effective_rank_kept(view: LayerView) -> float | None:
    """Return the effective rank over that of the initial weights; ``None`` when either matrix is all zeros."""
    now, then = effective_rank(view), _effective_rank(singular_values(needed(view.initial)))
    return now / then if now and then else None


def _effective_rank(values: Tensor) -> float | None:
    if values[-1] <= 0:
        return None
    return torch.special.entr(values / values.sum()).sum().exp().item()


def init_distance(view: LayerView) -> float | None:
    """Return the distance from the initial weights over their norm; ``None`` if they are all zero."""
    initial = needed(view.initial).double()
    length = initial.norm().item()
    return (needed(view.weight).double() - initial).norm().item() / length if length else None


def init_distance_kept(view: LayerView) -> float | None:
    """Return the distance that the rounded weights moved over that of the weights; ``None`` if no weight moved.

    It can exceed 1 where small steps cross from one representable value to the next.
    """
    grid, initial = needed(view.grid), needed(view.initial)
    moved = (view.scaled.double() - grid.scaled(initial).double()).norm().item()
    shown = (view.on_grid.double() - grid.rounded(initial).double()).norm().item()
    return shown / moved if moved else None


def init_distance_rungs(view: LayerView) -> float:
    """Return the mean distance from the initial weights in rungs, both rounded at the present weights' scale."""
    grid = needed(view.grid)
    moved = rung(view.on_grid, grid.format) - grid.rungs(needed(view.initial))
    return moved.abs().double().mean().item()


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
    *(Analysis(compute, QUANTIZED) for compute in (code_usage, code_used_frac, code_entropy, bit_activity)),
    Analysis(code_stale_frac, (*QUANTIZED, "previous", "previous_grid")),
    *(
        Analysis(compute, QUANTIZED)
        for compute in (sqnr_db, misalignment_mean, misalignment, boundary_frac, underflow_frac)
    ),
    Analysis.own(
        stiffness_field, GEOMETRY, "share of weights",
        "Share of the weights by floor(log2 S), S = ulp(w · s) / s the spacing of the representable values at w; "
        "in an unquantized control of those that its optimizer sees.",
        offline="weight",
    ),
    Analysis.own(
        stiffness_entropy, GEOMETRY, "bit",
        "Entropy of a layer's weights over the binades of their stiffness S: 0 where S is the same for all, and "
        "geometry is no more than a learning rate.",
        offline="weight", summary=mean, title="entropy of S",
    ),
    Analysis.own(
        stiffness_spread, GEOMETRY, "binades",
        "Standard deviation of log2 S over a layer's weights.",
        offline="weight", summary=mean, title="spread of S",
    ),
    Analysis(stable_rank, WEIGHT),
    Analysis(effective_rank, WEIGHT),
    Analysis(effective_rank_kept, (*WEIGHT, "initial")),
    Analysis(init_distance, (*WEIGHT, "initial")),
    Analysis(init_distance_kept, (*QUANTIZED, "initial")),
    Analysis(init_distance_rungs, (*QUANTIZED, "initial")),
)  # fmt: skip
