"""How sharply the loss bends at the final weights, layer by layer and in the whole model."""

from __future__ import annotations

from collections.abc import Callable

from altgrad.diagnostics.analysis import Analysis
from altgrad.diagnostics.hessian import TOLERANCE, Curvature
from altgrad.diagnostics.view import LayerView
from altgrad.metrics import Limit, mean

SHARP = Limit(above=True, value=1000.0)
HOW = (
    "of the loss on `diagnose.hessian_tokens` validation tokens, through the straight-through path at the quantized "
    "final weights"
)
TOP = (
    f"Largest eigenvalue of {{}} {HOW}: a lower bound, of residual {100 * TOLERANCE:g} % or less unless Lanczos ends "
    "before, after `diagnose.lanczos` steps."
)
WHERE = {"": ("curvature", "a layer's block of the Hessian"), "model_": ("model_curvature", "the whole Hessian")}
QUANTITIES: dict[str, tuple[str, Limit | None, Callable[[Curvature], float | None]]] = {
    "hessian_top": (
        TOP,
        SHARP,
        lambda c: c.spectrum.values[-1].item(),
    ),
    "hessian_second": (
        "Second largest eigenvalue of {} as the same steps know it, a lower bound.",
        None,
        lambda c: c.spectrum.values[-2].item() if len(c.spectrum.values) > 1 else None,
    ),
    "hessian_bottom": (
        "Smallest eigenvalue of {} as the same steps know it, an upper bound: below 0 at a saddle.",
        None,
        lambda c: c.spectrum.values[0].item(),
    ),
    "hessian_residual": (
        "Residual of the largest eigenvalue of {} over its magnitude: an eigenvalue is that near.",
        None,
        lambda c: c.spectrum.residual,
    ),
    "hessian_trace": (
        f"Trace of {{}} {HOW}; Hutchinson's mean of zᵀHz over `diagnose.hutchinson` vectors of random signs.",
        None,
        lambda c: c.trace,
    ),
    "hessian_trace_error": ("Standard error of that trace of {} over the vectors.", None, lambda c: c.trace_error),
}


def _analysis(where: str, quantity: str) -> Analysis:
    need, what = WHERE[where]
    definition, limit, read = QUANTITIES[quantity]

    def compute(view: LayerView) -> float | None:
        return read(getattr(view, need))

    compute.__name__ = where + quantity
    unit = "ratio" if quantity.endswith("residual") else "1/weight²"
    title = f"{quantity.removeprefix('hessian_').replace('_', ' ')} of {what}"
    return Analysis.own(
        compute, (need,), unit, definition.format(what), offline="loss", summary=mean, limit=limit, title=title
    )


ORDER = 80
ANALYSES = tuple(_analysis(where, quantity) for where in WHERE for quantity in QUANTITIES)
