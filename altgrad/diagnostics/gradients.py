"""The gradient that the quantized path gives, against the one that float32 would have given.

Both are of the same weights on the same batch.
"""

from __future__ import annotations

from altgrad.diagnostics.analysis import GRADIENTS, Analysis
from altgrad.diagnostics.correlation import cosine
from altgrad.diagnostics.rounding_error import ratio_db
from altgrad.diagnostics.view import LayerView


def grad_snr_db(view: LayerView) -> float | None:
    """``None`` if the two agree."""
    return ratio_db(view.grad_float, view.grad_quantized.double() - view.grad_float.double())


def grad_cosine(view: LayerView) -> float | None:
    """``None`` when one of them is zero."""
    return cosine(view.grad_quantized, view.grad_float)


ORDER = 60
ANALYSES = (
    Analysis(grad_snr_db, GRADIENTS),
    Analysis(grad_cosine, GRADIENTS),
)
