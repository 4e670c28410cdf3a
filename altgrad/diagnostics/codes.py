"""Which of the format's codes a layer uses, and what each of their bits carries."""

from __future__ import annotations

import numpy as np

from altgrad.diagnostics.analysis import QUANTIZED, Analysis
from altgrad.diagnostics.view import Histogram, LayerView, entropy, needed

WIDEST_SHOWN = 8  # bits; a wider format has about as many codes as a layer has weights


def code_usage(view: LayerView) -> Histogram | None:
    """x is the rung. ``None`` for formats of over 8 bits."""
    if needed(view.grid).format.bits > WIDEST_SHOWN:
        return None
    rungs, counts = view.rung_counts
    return Histogram(rungs.tolist(), (counts / counts.sum()).tolist())


def code_used_frac(view: LayerView) -> float:
    """+0 and -0 are one value."""
    rungs, _ = view.rung_counts
    return len(rungs) / len(needed(view.grid).format.values)


def code_entropy(view: LayerView) -> float:
    """At most log2 of the number of values, 0 if all weights share one."""
    return entropy(view.rung_counts[1])


def bit_activity(view: LayerView) -> Histogram:
    """x is the bit, 0 the lowest of the mantissa, the highest the sign.

    1 is a bit that is set in half of the weights, 0 one that never changes and so carries nothing.
    """
    counts = view.code_counts
    codes = np.arange(len(counts))
    bits = range(needed(view.grid).format.bits)
    ones = [counts[(codes >> bit) & 1 == 1].sum() for bit in bits]
    return Histogram(list(bits), [entropy(np.array([one, counts.sum() - one])) for one in ones])


def code_stale_frac(view: LayerView) -> float:
    """Each snapshot is on the quantization grid of its own scale, as the forward pass sees it."""
    now = needed(view.grid).rungs(needed(view.weight))
    before = needed(view.previous_grid).rungs(needed(view.previous))
    return (now == before).double().mean().item()


ORDER = 20
ANALYSES = (
    Analysis(code_usage, QUANTIZED),
    Analysis(code_used_frac, QUANTIZED),
    Analysis(code_entropy, QUANTIZED),
    Analysis(bit_activity, QUANTIZED),
    Analysis(code_stale_frac, (*QUANTIZED, "previous", "previous_grid")),
)
