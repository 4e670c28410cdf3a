"""The learning rate of every step: linear warm-up, then half a cosine. And what weight decay leaves over such a run."""

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


def kept_by_decay(decay: float, *, steps: int, warmup: float, final: float) -> float:
    """Return the share of a weight that decay alone leaves of it over a run: the product of what each step leaves.

    Args:
        decay: share that a step at the schedule's peak takes away, an arm's ``decay`` or ``plain_decay``.
        steps: of the run; with ``warmup`` and ``final`` as in `learning_rate`.
    """
    shape = (learning_rate(step, peak=1.0, steps=steps, warmup=warmup, final=final) for step in range(1, steps + 1))
    return math.prod(1 - decay * share for share in shape)
