"""Laws of the statistics of one comparison, and of adjusted p-values. Oracles: scipy.stats, Holm's definition."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from altgrad.reporting.statistics import Difference, PairedLosses, adjusted, interval, outlier, summarised


def test_a_contrast_is_its_row_of_weights_times_the_losses_also_where_runs_are_equal() -> None:
    """So that equal rows are the same question, and of equal runs no sign is lost."""
    losses = dict(zip(("E3M4", "E0M7"), np.random.default_rng(0).standard_normal((2, 5)), strict=True))
    losses["E1M6"] = losses["E0M7"]
    cells = [((name, "adamw", 1.0), seed, loss) for name, own in losses.items() for seed, loss in enumerate(own)]
    runs = PairedLosses.of(cells, range(5))
    assert runs.losses.shape == (2, 5)
    for signs in ((1, -1, 0), (0, 1, -1), (-2, 1, 1), (1, -1, 1)):
        contrast = {(name, "adamw", 1.0): sign for name, sign in zip(losses, signs, strict=True) if sign}
        expected = sum(sign * losses[name] for name, sign in zip(losses, signs, strict=True))
        assert np.allclose(runs.row(contrast) @ runs.losses, expected)
        assert np.allclose(runs.by_seed(contrast), expected)


def test_one_seed_has_no_spread_and_none_has_no_difference() -> None:
    one = summarised(np.array([0.75, np.nan]))
    assert (one.n, one.mean) == (1, 0.75) and math.isnan(one.sd)
    assert summarised(np.array([np.nan])) is None


@given(
    base=st.lists(st.integers(1, 10**6), min_size=2, max_size=8),
    gap=st.lists(st.integers(-1000, 1000), min_size=1, max_size=2),
    places=st.integers(0, 6),
)
@settings(max_examples=200, deadline=None)
def test_differences_spread_where_their_decimals_do(base: list[int], gap: list[int], places: int) -> None:
    """Oracle: decimal arithmetic, which rounds nothing here."""
    a = [Decimal(n).scaleb(-places) for n in base]
    b = [x + Decimal(gap[i % len(gap)]).scaleb(-places) for i, x in enumerate(a)]
    rows = [((name, "adamw", 1.0), i, float(x)) for name, own in (("a", a), ("b", b)) for i, x in enumerate(own)]
    found = PairedLosses.of(rows, range(len(base))).difference({("b", "adamw", 1.0): 1, ("a", "adamw", 1.0): -1})
    differences = [y - x for x, y in zip(a, b, strict=True)]
    assert (found.sd == 0) == (len(set(differences)) == 1)
    assert found.is_zero == (not any(differences))
    assert found.mean == pytest.approx(float(sum(differences) / len(differences)), abs=1e-9 * float(max(a)))


@pytest.mark.parametrize("seeds", [2, 3, 5, 9])
def test_a_comparison_is_the_paired_t_test(seeds: int) -> None:
    a, b = np.random.default_rng(seeds).normal([[3.5], [3.6]], 0.05, (2, seeds))
    found, oracle = summarised(np.insert(a - b, 1, np.nan)), stats.ttest_rel(a, b)
    assert found.n == seeds and found.mean / found.error == pytest.approx(oracle.statistic, rel=1e-9)
    assert found.p_value() == pytest.approx(oracle.pvalue, rel=1e-9)
    ends = [*oracle.confidence_interval(0.95)]
    assert [found.mean - found.half_width, found.mean + found.half_width] == pytest.approx(ends, rel=1e-9)
    assert interval(a - b)[1:] == pytest.approx(ends, rel=1e-9)


def test_a_p_value_is_that_of_the_nearer_end_of_what_no_seed_takes_away() -> None:
    """``least`` to either side of no difference, so two tails that lie apart."""
    for mean in (0.0, 0.05, 0.2, -0.3):
        tails = stats.t.cdf([(0.05 - abs(mean)) / 0.1, (-0.05 - abs(mean)) / 0.1], 3).sum()
        assert Difference(4, mean, 0.2).p_value(0.05) == pytest.approx(min(1.0, tails))


@pytest.mark.parametrize("found", [Difference(1, 0.3, math.nan), Difference(5, 0.3, 0.0), Difference(5, 0.0, 0.0)])
def test_without_a_spread_there_is_neither_p_value_nor_interval(found: Difference) -> None:
    assert math.isnan(found.p_value()) and math.isnan(found.half_width)


@pytest.mark.parametrize("count", [3, 5, 12])
def test_an_outlier_is_that_of_grubbs(count: int) -> None:
    """At the critical value of G as Grubbs's tables have it, from Student's t, p is 5 %."""
    t = stats.t.isf(0.05 / (2 * count), count - 2)
    critical = (count - 1) / math.sqrt(count) * math.sqrt(t**2 / (count - 2 + t**2))
    values = np.random.default_rng(count).standard_normal(count)
    low, high = 0.0, 1e6
    for _ in range(200):  # until the last value is as far out as the table has it
        values[-1] = middle = (low + high) / 2
        g = abs(middle - values.mean()) / values.std(ddof=1)
        low, high = (middle, high) if g < critical else (low, middle)
    place, p = outlier(np.insert(values, 1, np.nan))
    assert place == count and p == pytest.approx(0.05, rel=1e-6)


@pytest.mark.parametrize("values", [[1.0, 9.0], [1.0, np.nan, 9.0], [1.0, 1.0, 1.0, 9.0], [np.nan] * 4])
def test_what_cannot_be_told_is_no_outlier(values: list[float]) -> None:
    assert outlier(np.array(values))[1] == 1


# --- adjusted p-values -----------------------------------------------------------------------------


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
