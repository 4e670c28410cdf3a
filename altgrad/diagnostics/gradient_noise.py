"""How large a layer's weight gradient is beside its quantization noise, and which tensors that noise comes from.

Chmiel et al. 2025 (arXiv 2505.19115) find that quantized training becomes less effective once the norm of the gradient
falls below about sqrt(3) times that of its quantization noise. They speak of the expected gradient; that of a batch,
which is measured here, is larger by the noise of the batch, so that a ratio above the line is necessary and does not
suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from altgrad.config.recipe import ROLES
from altgrad.diagnostics.analysis import Analysis
from altgrad.diagnostics.view import LayerView, needed
from altgrad.metrics import mean


def gradient_to_noise(view: LayerView) -> float | None:
    """``None`` where quantization changes nothing."""
    noise = needed(view.noise)
    return math.sqrt(noise.signal / noise.together) if noise.together else None


def cosine_exact(view: LayerView) -> float | None:
    """``None`` where quantization changes nothing, and where either gradient is zero."""
    noise = needed(view.noise)
    quantized = noise.signal + 2 * noise.along + noise.together  # squared norm of the gradient with its noise
    if not noise.together or not noise.signal or quantized <= 0:
        return None
    return (noise.signal + noise.along) / math.sqrt(noise.signal * quantized)


def noise_additivity(view: LayerView) -> float | None:
    """``None`` where no cause makes any noise."""
    noise = needed(view.noise)
    alone = sum(noise.causes.values())
    return noise.together / alone if alone else None


def noise_bias(view: LayerView) -> float | None:
    """``None`` where there is no noise, before the last step, and where one sequence was all there was."""
    noise = needed(view.noise)
    power = noise.bias + noise.scatter
    return noise.bias / power if power > 0 else None  # of NaN too: where the two were not known by themselves


def _share(role: str) -> Callable[[LayerView], float | None]:
    def compute(view: LayerView) -> float | None:
        causes = needed(view.noise).causes
        alone = sum(causes.values())
        return causes.get(role, 0.0) / alone if alone else None

    compute.__name__ = f"noise_from_{role}"
    return compute


ORDER = 62
ANALYSES = (
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
)  # fmt: skip
