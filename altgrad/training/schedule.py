"""The learning rate of every step: linear warm-up, then half a cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, peak: float, steps: int, warmup: float, final: float) -> float:
    """Return the learning rate of update ``step`` (1-based, up to ``steps``).

    It rises linearly to ``peak`` over the first ``warmup`` share of the steps and falls along a
    cosine to ``final * peak``, reached at the last step (Loshchilov & Hutter, SGDR, ICLR 2017).
    """
    rising = round(warmup * steps)
    if step <= rising:
        return peak * step / rising
    progress = (step - rising) / max(1, steps - rising)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
