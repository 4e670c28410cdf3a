"""Which of the format's codes a layer uses, and what each of their bits carries."""

from __future__ import annotations

import numpy as np

from altgrad.diagnostics.view import Histogram, LayerView
from altgrad.numerics import rung

WIDEST_SHOWN = 8  # bits; a wider format has about as many codes as a layer has weights


def code_usage(view: LayerView) -> Histogram | None:
    """Share of the weights on each rung that occurs; x is the rung. ``None`` for formats of over 8 bits."""
    if view.grid.format.bits > WIDEST_SHOWN:
        return None
    rungs, counts = view.rung_counts
    return Histogram(rungs.tolist(), (counts / counts.sum()).tolist())


def code_used_frac(view: LayerView) -> float:
    """Distinct values that occur, as a share of the format's distinct finite values."""
    rungs, _ = view.rung_counts
    return len(rungs) / len(view.grid.format.values)


def code_entropy(view: LayerView) -> float:
    """Entropy of the distribution over values, in bits: at most log2 of their number, 0 if all weights share one."""
    return _entropy(view.rung_counts[1])


def bit_activity(view: LayerView) -> Histogram:
    """Entropy of each bit of the code by itself; x is the bit, 0 the lowest of the mantissa, the highest the sign.

    1 is a bit that is set in half of the weights, 0 one that never changes and so carries nothing.
    """
    counts = view.code_counts
    codes = np.arange(len(counts))
    bits = range(view.grid.format.bits)
    ones = [counts[(codes >> bit) & 1 == 1].sum() for bit in bits]
    return Histogram(list(bits), [_entropy(np.array([one, counts.sum() - one])) for one in ones])


def code_stale_frac(view: LayerView) -> float:
    """Share of the weights whose code is the same as at the snapshot before.

    Each snapshot is on the grid of its own scale, as the forward pass sees it. In the master-weight
    regime this is about the quantized *view* of weights that move all the time.
    """
    now, before = view.grid.rungs(view.weight), view.previous_grid.rungs(view.previous)
    return (now == before).double().mean().item()


def init_distance_rungs(view: LayerView) -> float:
    """Mean number of representable values between a weight and its initial value, both on today's grid."""
    moved = rung(view.on_grid, view.grid.format) - view.grid.rungs(view.initial)
    return moved.abs().double().mean().item()


def _entropy(counts: np.ndarray) -> float:
    """Entropy in bits of the distribution with these counts."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum() + 0.0)  # + 0.0 turns -0 into 0
