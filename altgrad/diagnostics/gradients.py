"""What quantization does to a layer's weight gradient, and how the gradient correlates with the quantization grid.

Metrics on one fixed batch compare the gradient of the quantized path with float32's and with the weights' stiffness.
They also count units whose gradient is zero. Metrics on `diagnose.noise_tokens` compare the size of the gradient with
its quantization noise, and split the noise by the tensor that causes it.

Chmiel et al. 2025 (arXiv 2505.19115) find that quantized training becomes less effective once the norm of the gradient
falls below about sqrt(3) times the norm of its quantization noise. They mean the expected gradient. The gradient of a
batch, measured here, is larger by the noise of the batch. So a ratio above sqrt(3) is necessary, not sufficient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from altgrad.config.recipe import ROLES
from altgrad.diagnostics.analysis import (
    GEOMETRY,
    GRADIENTS,
    Analysis,
    LayerView,
    cosine,
    needed,
    ratio_db,
    shuffled,
    spearman,
)
from altgrad.metrics import Limit, mean

WITH_STIFFNESS = (*GEOMETRY, "grad_quantized")


def grad_snr_db(view: LayerView) -> float | None:
    """Return the SNR in dB of the quantized gradient; ``None`` if it equals float32's or float32's is zero."""
    exact = needed(view.grad_float)
    return ratio_db(exact, needed(view.grad_quantized).double() - exact.double())


def grad_cosine(view: LayerView) -> float | None:
    """Return the cosine of the quantized and the float32 gradient; ``None`` when one of them is zero."""
    return cosine(needed(view.grad_quantized), needed(view.grad_float))


def gradient_to_noise(view: LayerView) -> float | None:
    """Return the norm of the gradient over that of its noise; ``None`` where quantization changes nothing."""
    noise = needed(view.noise)
    return math.sqrt(noise.signal / noise.together) if noise.together else None


def cosine_exact(view: LayerView) -> float | None:
    """Return the cosine of the gradients with and without noise; ``None`` where they are equal or one is zero."""
    noise = needed(view.noise)
    quantized = noise.signal + 2 * noise.along + noise.together  # squared norm of the gradient with its noise
    if not noise.together or not noise.signal or quantized <= 0:
        return None
    return (noise.signal + noise.along) / math.sqrt(noise.signal * quantized)


def noise_additivity(view: LayerView) -> float | None:
    """Return the noise power of all roles together over the sum of each alone; ``None`` where that sum is zero."""
    noise = needed(view.noise)
    alone = sum(noise.causes.values())
    return noise.together / alone if alone else None


def noise_bias(view: LayerView) -> float | None:
    """Return the bias as a share of bias + scatter; ``None`` without noise, or where bias was not measured."""
    noise = needed(view.noise)
    power = noise.bias + noise.scatter
    return noise.bias / power if power > 0 else None  # None for NaN too: bias and scatter were not measured


def _share(role: str) -> Callable[[LayerView], float | None]:
    def compute(view: LayerView) -> float | None:
        causes = needed(view.noise).causes
        alone = sum(causes.values())
        return causes.get(role, 0.0) / alone if alone else None

    compute.__name__ = f"noise_from_{role}"
    return compute


def gradient_stiffness_rho(view: LayerView) -> float | None:
    """Return the rank correlation of the gradient's size and the stiffness; ``None`` where either is constant."""
    return spearman(needed(view.grad_quantized).abs(), view.stiffness)


def descent_share(view: LayerView) -> float | None:
    """Return the loss descent of a step along -S g over that of a step of equal length along -g, to first order.

    To first order a step d changes the loss by <g, d>. For d = -r g/|g| that is -r |g|, for d = -r S g/|S g| it is
    -r <g, S g>/|S g|; their ratio <g, S g>/(|g| |S g|) is the cosine of the two directions, 1 for a constant S.
    ``None`` for a gradient of zero.
    """
    grad = needed(view.grad_quantized)
    return cosine(grad, view.stiffness * grad)


def descent_share_shuffled(view: LayerView) -> float | None:
    """Return :func:`descent_share` with S shuffled over the weights, its control. ``None`` for a zero gradient."""
    grad = needed(view.grad_quantized)
    return cosine(grad, shuffled(view.stiffness) * grad)


def dead_unit_frac(view: LayerView) -> float:
    """Return the share of output units (rows of the weight) whose gradient is zero throughout."""
    return (needed(view.grad_quantized) == 0).all(dim=1).double().mean().item()


ANALYSES = (
    Analysis(grad_snr_db, GRADIENTS),
    Analysis(grad_cosine, GRADIENTS),
    Analysis(gradient_to_noise, ("noise",)),
    Analysis(cosine_exact, ("noise",)),
    *(Analysis(_share(role), ("noise",)) for role in ROLES),
    Analysis.own(
        noise_additivity, ("noise",), "ratio",
        "Power of the gradient's quantization noise with all tensors quantized, over the sum of the powers with "
        "one kind alone: 1 where the three add up like independent errors.",
        offline="weight_grad", summary=mean, title="noise of all over the sum of each",
    ),
    Analysis.own(
        noise_bias, ("noise",), "share of noise power",
        "Share of the gradient's quantization noise that every batch has, so that it does not average out over "
        "steps: the squared norm of the noise's mean over batches, as a share of that plus the mean squared "
        "distance from it of batches of training's size. Estimated from 16 parts of `diagnose.noise_tokens`.",
        offline="weight_grad", summary=mean, title="share of the noise that is bias",
    ),
    Analysis.own(
        gradient_stiffness_rho, WITH_STIFFNESS, "rank correlation",
        "Spearman's correlation of |ĝ| and S over a layer's weights, ĝ the weight gradient through the quantized "
        "path on one fixed batch and S the stiffness: 0 where the gradient does not know of the quantization grid.",
        offline="weight_grad", summary=mean, title="size of the gradient with S, rank correlation",
    ),
    Analysis.own(
        descent_share, WITH_STIFFNESS, "ratio",
        "First-order descent of the loss along S·ĝ over that along ĝ, by steps of equal length: "
        "⟨ĝ, S·ĝ⟩ / (‖ĝ‖ ‖S·ĝ‖).",
        offline="weight_grad", summary=mean, title="descent along S·g over that along g",
    ),
    Analysis.own(
        descent_share_shuffled, WITH_STIFFNESS, "ratio",
        "The same with S shuffled among the weights of its layer: the control.",
        offline="weight_grad", summary=mean, title="the same, S shuffled",
    ),
    Analysis.own(
        dead_unit_frac, ("grad_quantized",), "share of units",
        "Share of a layer's output units whose row of the weight gradient, through the quantized path on one fixed "
        "batch, is zero throughout.",
        offline="weight_grad", summary=mean, limit=Limit(above=True, value=0.2), title="dead units",
    ),
)  # fmt: skip
