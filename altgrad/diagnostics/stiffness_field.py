"""The stiffness of a layer's weights: how far apart the representable values are around each."""

from __future__ import annotations

import numpy as np

from altgrad.diagnostics.analysis import GEOMETRY, Analysis
from altgrad.diagnostics.view import Histogram, LayerView, entropy
from altgrad.metrics import mean


def stiffness_field(view: LayerView) -> Histogram:
    """x is floor(log2 S), the binade of the stiffness; ready to be drawn over snapshots."""
    found, counts = _binades(view)
    return Histogram(found.tolist(), (counts / counts.sum()).tolist())


def stiffness_entropy(view: LayerView) -> float:
    """0 where all weights have one stiffness, as in a format without exponent bits: then it is a learning rate."""
    return entropy(_binades(view)[1])


def stiffness_spread(view: LayerView) -> float:
    """0 where all weights have one stiffness."""
    return view.stiffness.log2().std(correction=0).item()


def _binades(view: LayerView) -> tuple[np.ndarray, np.ndarray]:
    return np.unique(np.floor(np.log2(view.stiffness.double().numpy())), return_counts=True)


ORDER = 32
ANALYSES = (
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
)  # fmt: skip
