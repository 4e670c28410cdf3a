"""Where the format's range lies over the histogram of a layer's magnitudes, in the weights' own unit."""

from __future__ import annotations

import math

from altgrad.diagnostics.analysis import GEOMETRY, Analysis
from altgrad.diagnostics.view import LayerView, needed
from altgrad.metrics import Metric


def range_low_log2(view: LayerView) -> float:
    """The left edge of `log2_magnitude`'s weights that have a value of their own."""
    return _edge(view, needed(view.geometry).format.smallest)


def range_high_log2(view: LayerView) -> float:
    """The right edge: what lies beyond it saturates."""
    return _edge(view, needed(view.geometry).format.max)


def _edge(view: LayerView, value: float) -> float:
    return math.log2(value / needed(view.geometry).scale.double().median().item())


ORDER = 12
ANALYSES = (
    Analysis(
        range_low_log2,
        GEOMETRY,
        Metric(
            "range_low_log2", "log2",
            "log2 of the smallest magnitude above 0 that the format has at the layer's scale (the median of several).",
            offline="weight",
        ),
    ),
    Analysis(
        range_high_log2,
        GEOMETRY,
        Metric(
            "range_high_log2", "log2", "log2 of the largest magnitude that the format has at the layer's scale.",
            offline="weight",
        ),
    ),
)  # fmt: skip
