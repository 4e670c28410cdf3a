"""Units that learn nothing from a batch."""

from __future__ import annotations

from altgrad.diagnostics.analysis import Analysis
from altgrad.diagnostics.view import LayerView, needed
from altgrad.metrics import Limit, mean


def dead_unit_frac(view: LayerView) -> float:
    """A row of the weight is an output unit; rounding its incoming gradient to zero kills it, as a unit's own zero."""
    return (needed(view.grad_quantized) == 0).all(dim=1).double().mean().item()


ORDER = 64
ANALYSES = (
    Analysis.own(
        dead_unit_frac, ("grad_quantized",), "share of units",
        "Share of a layer's output units whose row of the weight gradient, through the quantized path on one fixed "
        "batch, is zero throughout.",
        offline="weight_grad", summary=mean, limit=Limit(above=True, value=0.2), title="dead units",
    ),
)  # fmt: skip
