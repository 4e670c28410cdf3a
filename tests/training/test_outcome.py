"""Where the judgement of a run changes. Oracle: the smoothed loss, placed just below and just above each threshold."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from altgrad.training.outcome import OutcomeTracker

WINDOW = 5
NEAR = 1e-6


def held_at(ratio: float, spike: float = 2.0, **state) -> OutcomeTracker:
    """Return a tracker whose smoothed loss was 1 at its lowest and is ``ratio`` now."""
    return OutcomeTracker(spike=spike, window=WINDOW, smoothed=ratio, minimum=1.0, **state)


def steps_until_divergence(tracker: OutcomeTracker, loss: float, at_most: int = 100) -> int | None:
    return next((step for step in range(1, at_most + 1) if tracker.update(step, loss, 1.0)), None)


def test_the_running_mean_keeps_nine_tenths_of_itself():
    tracker = OutcomeTracker(2.0, WINDOW)
    for step, (loss, smoothed) in enumerate([(4.0, 4.0), (2.0, 3.8), (2.0, 3.62), (13.62, 4.62)], 1):
        tracker.update(step, loss, 1.0)
        assert tracker.smoothed == pytest.approx(smoothed, rel=1e-12)
    assert tracker.minimum == pytest.approx(3.62, rel=1e-12)


def test_a_loss_above_twelve_tenths_of_its_minimum_for_four_windows_is_a_drift():
    below, above = held_at(1.2 - NEAR), held_at(1.2 + NEAR)
    assert steps_until_divergence(below, 1.2 - NEAR) is None and below.drift_start is None
    assert steps_until_divergence(above, 1.2 + NEAR) == 1 + 4 * WINDOW  # first seen there in step 1
    assert (above.signature, above.outcome_step) == ("drift", 1)


@pytest.mark.parametrize("spike", [1.5, 2.0, 3.0])
def test_a_loss_above_the_spike_ratio_for_a_window_is_a_spike(spike: float):
    above = held_at(spike + NEAR, spike)
    assert steps_until_divergence(above, spike + NEAR) == 1 + WINDOW
    assert (above.signature, above.outcome_step) == ("spike", 1)
    below = held_at(spike - NEAR, spike)
    assert steps_until_divergence(below, spike - NEAR) == 1 + 4 * WINDOW and below.signature == "drift"


@pytest.mark.parametrize(("share", "signature"), [(0.01, "nonfinite"), (0.01 + NEAR, "saturation")])
def test_more_than_a_hundredth_beyond_the_maximum_explains_a_divergence(share: float, signature: str):
    tracker = OutcomeTracker(2.0, WINDOW)
    tracker.observe_overflow(share)
    tracker.observe_overflow(0.0)  # one such pass is enough
    assert tracker.update(7, math.nan, 1.0) and tracker.diverged
    assert (tracker.signature, tracker.outcome_step) == (signature, 7)


def test_only_a_spike_is_judged_at_the_end():
    drifting, spiking, completed = held_at(1.5), held_at(2.5), held_at(1.0)
    for tracker in (drifting, spiking, completed):
        tracker.update(9, tracker.smoothed, 1.0)
        tracker.finish()
    assert [t.outcome for t in (drifting, spiking, completed)] == ["completed", "diverged", "completed"]
    assert (spiking.signature, spiking.outcome_step) == ("spike", 9)
    spiking.spike_start = 3
    spiking.finish()
    assert spiking.outcome_step == 9  # judged once


def judged(losses: list[float], norm: float = 1.0, *, restored: bool = False) -> OutcomeTracker:
    """Return a tracker after all losses, of which the last has the norm; ``restored`` from its state at each step."""
    tracker = OutcomeTracker(2.0, WINDOW)
    for step, loss in enumerate(losses, 1):
        if restored:
            tracker = OutcomeTracker(**json.loads(json.dumps(asdict(tracker))))
        if tracker.update(step, loss, norm if step == len(losses) else 1.0):
            return tracker
    tracker.finish()
    return tracker


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [([8 / (1 + i / 20) for i in range(200)], "completed"), ([2.0] * 50 + [30.0] + [2.0] * 100, "completed"),
     ([2.0] * 50 + [9.0] * 100, "diverged")], ids=["falls", "comes back", "stays"],
)  # fmt: skip
def test_a_loss_that_falls_or_comes_back_completes_and_a_tracker_goes_on_from_its_state(losses, outcome):
    tracker = judged(losses)
    assert tracker.outcome == outcome and tracker == judged(losses, restored=True)
    assert outcome == "diverged" or (tracker.signature, tracker.outcome_step) == ("none", None)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_a_number_that_is_not_finite_ends_the_run_at_its_step(loss, norm):
    tracker = judged([2.0] * 9 + [loss], norm)
    assert (tracker.signature, tracker.outcome_step) == ("nonfinite", 10)
