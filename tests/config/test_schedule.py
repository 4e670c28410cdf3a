"""The schedule's shape, and the share of a weight that decay leaves over it, against the product written out."""

import math

import pytest

from altgrad.config.schema import kept_by_decay, learning_rate


@pytest.mark.parametrize(("steps", "warmup", "final"), [(300, 0.1, 0.1), (7, 0.0, 0.0), (1, 1.0, 0.5), (50, 1.0, 0.1)])
@pytest.mark.parametrize("decay", [0.0, 3e-4, 0.2])
def test_what_decay_leaves_is_the_product_over_the_steps(steps, warmup, final, decay):
    kept, rising = 1.0, round(warmup * steps)
    for step in range(1, steps + 1):
        share = step / rising if step <= rising else 1.0
        if step > rising:
            along = (step - rising) / (steps - rising)
            share = final + (1 - final) * (1 + math.cos(math.pi * along)) / 2
        kept -= kept * decay * share
    assert kept_by_decay(decay, steps=steps, warmup=warmup, final=final) == pytest.approx(kept, rel=1e-12)


def test_the_default_arms_keep_95_percent_of_their_weights():
    """The figure of the reports for 300 steps: the peaks add up to 0.545 of the steps."""
    kept = kept_by_decay(3e-4, steps=300, warmup=0.1, final=0.1)
    mean = sum(learning_rate(s, peak=1.0, steps=300, warmup=0.1, final=0.1) for s in range(1, 301)) / 300
    assert kept == pytest.approx(math.exp(-3e-4 * 300 * mean), rel=1e-4)
    assert kept == pytest.approx(0.952, abs=5e-4)
