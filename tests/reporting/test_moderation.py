"""Laws of the moderated t statistic. Oracles: scipy.stats, Smyth's formulas by hand, simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special, stats

from altgrad.reporting.moderation import DOUBT, UNLIKE, Spread, _inverse_trigamma, fitted
from altgrad.reporting.statistics import Difference


def drawn(variances: list[float], seeds: int, key: int = 0) -> list[Difference]:
    """Return independent differences without effect."""
    random = np.random.default_rng(key)
    values = np.sqrt(variances)[:, None] * random.standard_normal((len(variances), seeds))
    return [Difference(seeds, row.mean(), row.std(ddof=1)) for row in values]


def test_one_comparison_alone_is_the_paired_t_test() -> None:
    values = np.random.default_rng(1).normal(0.4, 1, 6)
    difference = Difference(6, values.mean(), values.std(ddof=1))
    spread = fitted([difference], np.eye(1))
    oracle = stats.ttest_1samp(values, 0)
    assert spread.p_value(difference) == pytest.approx(oracle.pvalue, rel=1e-9)
    low, high = oracle.confidence_interval(0.95)
    assert difference.mean - spread.half_width(difference) == pytest.approx(low)
    assert difference.mean + spread.half_width(difference) == pytest.approx(high)


def test_equal_spreads_are_one_spread_with_all_degrees_of_freedom() -> None:
    differences = [Difference(5, mean, 0.1) for mean in (0.0, 0.1, -0.2, 0.05)]
    spread = fitted(differences, np.eye(4))
    assert math.isinf(spread.prior) and spread.dof == pytest.approx(16)
    log_mean = math.log(0.01) - special.psi(2) + math.log(2)
    assert spread.variance == pytest.approx(math.exp(log_mean))
    t = 0.1 / math.sqrt(spread.variance / 5)
    assert spread.p_value(differences[1]) == pytest.approx(2 * stats.t.sf(t, 16))


def test_the_prior_is_smyths_with_the_spread_at_the_upper_end() -> None:
    """By hand: Var(log s^2) = trigamma(d/2) + trigamma(d0/2), the left side at its DOUBT quantile."""
    differences = drawn([0.01, 1.0, 0.2, 3.0, 0.5, 0.03], 5)
    logs = np.log([d.sd**2 for d in differences])
    upper = logs.var(ddof=1) * 5 / stats.chi2.ppf(DOUBT, 5)
    spread = fitted(differences, np.eye(6))
    assert special.polygamma(1, spread.prior / 2) == pytest.approx(upper - special.polygamma(1, 2.0), rel=1e-6)
    quiet = min(differences, key=lambda d: d.sd)
    weight = spread.prior / (spread.prior + 4)
    error, dof = spread.error(quiet)
    assert error**2 * 5 == pytest.approx(weight * spread.variance + (1 - weight) * quiet.sd**2)
    assert dof == pytest.approx(spread.prior + 4)


@pytest.mark.parametrize("value", [1e-8, 1e-3, 0.1, 1.0, 7.0, 300.0, 1e9])
def test_inverse_trigamma(value: float) -> None:
    assert special.polygamma(1, _inverse_trigamma(value)) == pytest.approx(value, rel=1e-3 if value > 1e7 else 1e-6)


def test_comparisons_with_one_baseline_know_their_spread_less_well() -> None:
    """Contrasts a-0, b-0, ... correlate by 1/2, their variances by 1/4: d k / (1 + (k - 1) / 4) degrees of freedom."""
    k = 7
    shared = np.hstack([np.eye(k), -np.ones((k, 1))])
    spread = fitted([Difference(5, 0.0, 0.1)] * k, shared)
    assert spread.dof == pytest.approx(4 * k / (1 + (k - 1) / 4))


def test_the_degrees_of_freedom_of_a_shared_baseline_match_simulation() -> None:
    """2 (mean / sd)^2 of the mean variance of contrasts with one baseline, over 4,000 draws; 4 sigma is 9 %."""
    random = np.random.default_rng(3)
    runs = random.standard_normal((4000, 8, 5))
    pooled = (runs[:, 1:] - runs[:, :1]).var(axis=2, ddof=1).mean(axis=1)
    spread = fitted([Difference(5, 0.0, 0.1)] * 7, np.hstack([np.eye(7), -np.ones((7, 1))]))
    assert 2 * pooled.mean() ** 2 / pooled.var() == pytest.approx(spread.dof, rel=0.09)


def test_a_difference_that_spreads_unlike_the_others_is_read_by_itself() -> None:
    spread = Spread(variance=1.0, prior=math.inf, dof=40, comparisons=10, seeds=5)
    limit = math.sqrt(stats.f.isf(UNLIKE, 4, 40))
    inside, outside = (Difference(5, 0.1, limit * (1 + sign * 1e-6)) for sign in (-1, 1))
    assert spread.error(inside) == pytest.approx((math.sqrt(1 / 5), 40))
    assert spread.error(outside) == pytest.approx((outside.sd / math.sqrt(5), 4))


def test_one_seed_says_nothing() -> None:
    spread = Spread(variance=1.0, prior=math.inf, dof=40, comparisons=10, seeds=5)
    assert spread.p_value(Difference(1, 9.0, math.nan)) == 1
    assert math.isnan(spread.half_width(Difference(1, 9.0, math.nan)))
    assert fitted([Difference(1, 9.0, math.nan)], np.eye(1)) is None


def test_what_counts_as_none_is_taken_off_the_difference() -> None:
    """H0: |delta| <= least, whose most likely place is its edge."""
    spread = Spread(variance=1.0, prior=math.inf, dof=30, comparisons=9, seeds=5, least=0.5)
    found = spread.p_value(Difference(5, -2.0, 1.0))
    error = 1 / math.sqrt(5)
    assert found == pytest.approx(stats.t.sf(1.5 / error, 30) + stats.t.sf(2.5 / error, 30))
    assert spread.p_value(Difference(5, 0.4, 1.0)) > 0.5
    assert spread.floor(10**9) == 0.5


def test_the_floor_is_the_two_sided_quantile() -> None:
    spread = Spread(variance=0.04, prior=math.inf, dof=12, comparisons=5, seeds=3)
    assert spread.floor(3) == pytest.approx(stats.t.ppf(0.975, 12) * 0.2 / math.sqrt(3))


@pytest.mark.parametrize("variances", [[1.0] * 12, [1.0] * 11 + [25.0], list(np.geomspace(0.1, 10, 12))])
def test_p_values_of_nothing_are_at_most_as_often_small_as_they_say(variances: list[float]) -> None:
    """2,000 draws of 12 differences with 5 seeds: the smallest p, Bonferroni-adjusted, is below 5 % in at most 5 %
    (and 4 sigma, 2 %)."""
    false = 0
    for key in range(2000):
        differences = drawn(variances, 5, key)
        spread = fitted(differences, np.eye(12))
        false += min(spread.p_value(d) for d in differences) < 0.05 / 12
    assert false / 2000 < 0.07
