"""The gradient that the quantized path gives, against the one that float32 would have given.

Both are of the same weights on the same batch.
"""

from __future__ import annotations

from altgrad.diagnostics.rounding_error import ratio_db
from altgrad.diagnostics.view import LayerView


def grad_snr_db(view: LayerView) -> float | None:
    """10 log10(sum g^2 / sum (g_q - g)^2), g in float32 and g_q through the quantized path; ``None`` if they agree."""
    return ratio_db(view.grad_float, view.grad_quantized.double() - view.grad_float.double())


def grad_cosine(view: LayerView) -> float | None:
    """Cosine of the angle between the two gradients; ``None`` when one of them is zero."""
    quantized, plain = view.grad_quantized.double().flatten(), view.grad_float.double().flatten()
    norms = (quantized.norm() * plain.norm()).item()
    return (quantized @ plain).item() / norms if norms else None
