"""Is the quantization grid's geometry anything like the loss's? The natural gradient against the stiffness's.

The natural gradient F^-1 g is steepest descent in the metric of the Fisher information F. A geometry-aware arm
descends along S g, the Riemannian one along S^2 g, in the metric 1/S^2. If the format's geometry resembles the loss's,
these are nearer to F^-1 g than g itself (``_plain``) and than S g with S shuffled (``_shuffled``) are.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from altgrad.diagnostics.analysis import GEOMETRY, Analysis
from altgrad.diagnostics.correlation import cosine, shuffled, spearman
from altgrad.diagnostics.fisher import DAMPING
from altgrad.diagnostics.view import LayerView, needed
from altgrad.metrics import mean

FISHER = (*GEOMETRY, "fisher")
DIRECTIONS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "plain": ("g", "g itself, the control of a constant S", lambda s, g: g),
    "s": ("S·g", "S·g", lambda s, g: s * g),
    "s2": ("S²·g", "S²·g, the gradient in the metric 1/S²", lambda s, g: s.square() * g),
    "shuffled": (
        "S·g, S shuffled", "S·g with S shuffled among the weights of its layer, the control",
        lambda s, g: shuffled(s) * g,
    ),
}  # fmt: skip
APPROXIMATIONS = {
    "kfac": "Kronecker factors",
    "diagonal": "diagonal",
}


def fisher_trace(view: LayerView) -> float:
    """Of the true Fisher information, so comparable with the trace of the Hessian."""
    return needed(view.fisher).diagonal.double().sum().item()


def fisher_stiffness_rho(view: LayerView) -> float | None:
    """-1 where weights that matter most to the loss have the finest spacing. ``None`` where either is constant."""
    return spearman(needed(view.fisher).diagonal, view.stiffness)


def _alignment(approximation: str, direction: str) -> Analysis:
    """Return the analysis of the cosine of one natural gradient with one direction."""
    short, words, along = DIRECTIONS[direction]

    def compute(view: LayerView) -> float | None:
        fisher = needed(view.fisher)
        natural: Tensor = getattr(fisher, f"natural_{approximation}")
        return cosine(natural, along(view.stiffness, fisher.gradient))

    compute.__name__ = f"natural_{approximation}_{direction}"
    definition = (
        f"cos of the natural gradient F⁻¹g and {words}; F from its {APPROXIMATIONS[approximation]} at the quantized "
        f"final weights, on `diagnose.fisher_tokens` validation tokens with labels drawn from the model, damped by "
        f"{DAMPING:g} of its mean eigenvalue."
    )
    title = f"natural gradient ({APPROXIMATIONS[approximation]}) with {short}"
    return Analysis.own(compute, FISHER, "cosine", definition, offline="fisher", summary=mean, title=title)


ORDER = 70
ANALYSES = (
    Analysis.own(
        fisher_trace, ("fisher",), "1/weight²",
        "Trace of the Fisher information of a layer's weight per token, in the weights' own unit, with labels "
        "drawn from the model.",
        offline="fisher", summary=mean, title="trace of the Fisher information",
    ),
    Analysis.own(
        fisher_stiffness_rho, FISHER, "rank correlation",
        "Spearman's correlation of the Fisher information's diagonal and the stiffness S over a layer's weights: "
        "below 0 where the weights that the loss is most sensitive to have the finer spacing.",
        offline="fisher", summary=mean, title="Fisher information with S, rank correlation",
    ),
    *(_alignment(approximation, direction) for approximation in APPROXIMATIONS for direction in DIRECTIONS),
)  # fmt: skip
