"""The geometry of the loss at a run's final weights: its Fisher information and Hessian, beside the format's spacing.

Does the format's spacing S (stiffness) resemble the geometry of the loss? The natural gradient F^-1 g is steepest
descent in the metric of the Fisher information F. Spacing-scaled optimizers descend along S g, or along S^2 g, steepest
descent in the metric 1/S^2. If S resembles the loss's geometry, these directions are nearer to F^-1 g than the controls
are: g itself (``_plain``), and S g with S shuffled (``_shuffled``).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from altgrad.diagnostics.analysis import GEOMETRY, Analysis, LayerView, cosine, needed, shuffled, spearman
from altgrad.diagnostics.curvature import DAMPING, TOLERANCE, Curvature
from altgrad.metrics import Limit, mean

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
APPROXIMATIONS = {"kfac": "Kronecker factors", "diagonal": "diagonal"}


def fisher_trace(view: LayerView) -> float:
    """Return the trace of the true Fisher information, which can be compared with the trace of the Hessian."""
    return needed(view.fisher).diagonal.double().sum().item()


def fisher_stiffness_rho(view: LayerView) -> float | None:
    """Return the rank correlation of the Fisher diagonal and the stiffness; ``None`` where either is constant.

    It is -1 where the weights that matter most to the loss have the finest spacing.
    """
    return spearman(needed(view.fisher).diagonal, view.stiffness)


def _alignment(approximation: str, direction: str) -> Analysis:
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
    "hessian_top": (TOP, Limit(above=True, value=1000.0), lambda c: c.spectrum.values[-1].item()),
    "hessian_second": (
        "Second largest eigenvalue of {} as the same steps know it, a lower bound.", None,
        lambda c: c.spectrum.values[-2].item() if len(c.spectrum.values) > 1 else None,
    ),
    "hessian_bottom": (
        "Smallest eigenvalue of {} as the same steps know it, an upper bound: below 0 at a saddle.", None,
        lambda c: c.spectrum.values[0].item(),
    ),
    "hessian_residual": (
        "Residual of the largest eigenvalue of {} over its magnitude: an eigenvalue is that near.", None,
        lambda c: c.spectrum.residual,
    ),
    "hessian_trace": (
        f"Trace of {{}} {HOW}; Hutchinson's mean of zᵀHz over `diagnose.hutchinson` vectors of random signs.",
        None, lambda c: c.trace,
    ),
    "hessian_trace_error": ("Standard error of that trace of {} over the vectors.", None, lambda c: c.trace_error),
}  # fmt: skip


def _curvature(where: str, quantity: str) -> Analysis:
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
    *(_curvature(where, quantity) for where in WHERE for quantity in QUANTITIES),
)  # fmt: skip
