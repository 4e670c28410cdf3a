"""Laws of adjusted p-values. Oracles: Holm's definition, simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from altgrad.reporting.decision_rule import adjusted


def holm_by_definition(p: dict[str, float]) -> dict[str, float]:
    found, level = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        level = max(level, min(1.0, (len(p) - rank) * p[name]))
        found[name] = level
    return found


@pytest.mark.parametrize("count", [1, 5, 40])
def test_without_controls_it_is_holms_step_down(count: int) -> None:
    p = dict(zip(map(str, range(count)), np.random.default_rng(count).random(count) ** 4, strict=True))
    assert adjusted(p) == pytest.approx(holm_by_definition(p))


def test_what_a_gain_has_goes_to_its_controls_and_from_them_to_the_others() -> None:
    """By hand: two primary questions with half of the level each; two controls share what the gain had."""
    p = {"gain": 0.001, "other": 0.03, "null": 0.02, "virtual": 0.9}
    controls = {"gain": ["null", "virtual"]}
    found = adjusted(p, controls)
    assert found["gain"] == pytest.approx(0.002)
    assert found["other"] == pytest.approx(0.06)  # with its own half, as the controls keep the other
    assert found["null"] == pytest.approx(0.06)  # 0.02 / 0.25 alone; with the other's half 0.02 / 0.5
    assert found["virtual"] == pytest.approx(0.9)  # with all that is left
    without = adjusted({**p, "null": 1e-6, "virtual": 1e-6}, controls)
    assert without["other"] == pytest.approx(0.03)  # with all of the level
    late = adjusted({**p, "gain": 0.2, "other": 0.9, "null": 1e-9}, controls)
    assert late["null"] == late["gain"] == pytest.approx(0.4)  # asked only after the gain


def test_adjusted_values_are_ordered_bounded_and_never_below_their_own() -> None:
    random = np.random.default_rng(5)
    for _ in range(200):
        p = dict(zip("abcdefg", random.random(7) ** 3, strict=True))
        found = adjusted(p, {"a": ["b", "c"], "d": ["e"]})
        assert all(p[name] <= level * (1 + 1e-12) <= 1 + 1e-9 for name, level in found.items())
        assert found["b"] >= found["a"] and found["c"] >= found["a"] and found["e"] >= found["d"]


@pytest.mark.parametrize("true_gains", [0, 1, 3, 6])
def test_false_answers_are_rare_whichever_gains_are_real(true_gains: int) -> None:
    """6 gains with 2 controls each; gains may be real, controls never are. 3,000 draws; 4 sigma is 1.6 %."""
    random, wrong = np.random.default_rng(true_gains), 0
    gains = [f"gain{i}" for i in range(6)]
    controls = {gain: [f"{gain}-a", f"{gain}-b"] for gain in gains}
    for real in 2 * stats.norm.sf(6 + random.standard_normal((3000, true_gains))):
        p = {name: random.random() for name in (*gains, *itertools.chain(*controls.values()))}
        p |= dict(zip(gains[:true_gains], real, strict=True))
        found = adjusted(p, controls)
        wrong += any(level <= 0.05 for name, level in found.items() if name not in gains[:true_gains])
    assert wrong / 3000 < 0.066
