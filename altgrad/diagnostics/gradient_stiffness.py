"""Whether the gradient knows of the quantization grid: gradients against the stiffness of their weights."""

from __future__ import annotations

from altgrad.diagnostics.analysis import GEOMETRY, Analysis
from altgrad.diagnostics.correlation import cosine, shuffled, spearman
from altgrad.diagnostics.view import LayerView, needed
from altgrad.metrics import mean

NEEDS = (*GEOMETRY, "grad_quantized")


def gradient_stiffness_rho(view: LayerView) -> float | None:
    """``None`` where the stiffness or the gradient is the same everywhere."""
    return spearman(needed(view.grad_quantized).abs(), view.stiffness)


def descent_share(view: LayerView) -> float | None:
    """Of two steps of equal length, one along -g and one along -S g, the second has this share of the first's descent.

    To first order a step d changes the loss by <g, d>. For d = -r g/|g| that is -r |g|, for d = -r S g/|S g| it is
    -r <g, S g>/|S g|; their ratio <g, S g>/(|g| |S g|) is the cosine of the two directions, 1 for a constant S.
    ``None`` for a gradient of zero.
    """
    grad = needed(view.grad_quantized)
    return cosine(grad, view.stiffness * grad)


def descent_share_shuffled(view: LayerView) -> float | None:
    """The control of :func:`descent_share`: S with the same histogram and no place. ``None`` for a zero gradient."""
    grad = needed(view.grad_quantized)
    return cosine(grad, shuffled(view.stiffness) * grad)


ORDER = 62
ANALYSES = (
    Analysis.own(
        gradient_stiffness_rho, NEEDS, "rank correlation",
        "Spearman's correlation of |ĝ| and S over a layer's weights, ĝ the weight gradient through the quantized "
        "path on one fixed batch and S the stiffness: 0 where the gradient does not know of the quantization grid.",
        offline="weight_grad", summary=mean, title="size of the gradient with S, rank correlation",
    ),
    Analysis.own(
        descent_share, NEEDS, "ratio",
        "First-order descent of the loss along S·ĝ over that along ĝ, by steps of equal length: "
        "⟨ĝ, S·ĝ⟩ / (‖ĝ‖ ‖S·ĝ‖).",
        offline="weight_grad", summary=mean, title="descent along S·g over that along g",
    ),
    Analysis.own(
        descent_share_shuffled, NEEDS, "ratio",
        "The same with S shuffled among the weights of its layer: the control.",
        offline="weight_grad", summary=mean, title="the same, S shuffled",
    ),
)  # fmt: skip
