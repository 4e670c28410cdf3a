"""Laws of the statistics of one comparison. Oracle: scipy.stats."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from altgrad.reporting.statistics import Difference, PairedLosses, interval, outlier, summarised


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
