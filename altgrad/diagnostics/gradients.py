"""The gradient that the quantized path gives, against the one that float32 would have given.

Both are of the same weights on the same batch.
"""

from __future__ import annotations

from altgrad.diagnostics.analysis import GRADIENTS, Analysis
from altgrad.diagnostics.correlation import cosine
from altgrad.diagnostics.rounding_error import ratio_db
from altgrad.diagnostics.view import LayerView, needed


def grad_snr_db(view: LayerView) -> float | None:
    """``None`` if the two agree."""
    exact = needed(view.grad_float)
    return ratio_db(exact, needed(view.grad_quantized).double() - exact.double())


def grad_cosine(view: LayerView) -> float | None:
    """``None`` when one of them is zero."""
    return cosine(needed(view.grad_quantized), needed(view.grad_float))


ORDER = 60
ANALYSES = (
    Analysis(grad_snr_db, GRADIENTS),
    Analysis(grad_cosine, GRADIENTS),
)
