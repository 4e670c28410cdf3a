"""Laws of the moderated t statistic. Oracles: scipy.stats, Smyth's formulas by hand, simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats
from scipy.special import polygamma

from altgrad.reporting.statistics import DOUBT, Difference, Spread, _inverse_trigamma, _prior, fitted

NEAR = 1e-6


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


@pytest.mark.parametrize("prior", [math.inf, 6.0, 40.0])
@pytest.mark.parametrize(("n", "all_dof"), [(2, 20.0), (5, 20.0), (10, 20.0), (10, 3.0)])
def test_a_spread_that_one_in_twenty_of_the_others_has_stands_alone(prior: float, n: int, all_dof: float) -> None:
    """The F distribution's upper 5 %, at the degrees of freedom that the shared variance is known with."""
    spread = Spread(variance=0.25, prior=prior, dof=all_dof)
    known = min(prior, all_dof)
    edge = 0.25 * stats.f.isf(0.05, n - 1, known)
    alike, unlike = (Difference(n, 0.0, math.sqrt(edge * (1 + side * NEAR))) for side in (-1, 1))
    assert spread.error(unlike) == (pytest.approx(unlike.sd / math.sqrt(n)), n - 1)
    weight = 1.0 if math.isinf(prior) else prior / (prior + n - 1)
    shared = weight * 0.25 + (1 - weight) * alike.sd**2
    dof = max(n - 1, min(prior + n - 1, all_dof))  # never fewer than its own
    assert spread.error(alike) == (pytest.approx(math.sqrt(shared / n)), dof)


@pytest.mark.parametrize("own", [3, 4])
def test_variances_are_taken_to_be_as_unequal_as_one_time_in_ten_would_hide(own: int) -> None:
    """With the 10 % quantile of chi square in place of its mean, and trigamma inverted by bisection."""
    dof, variances = np.full(6, float(own)), np.array([0.2, 1.0, 5.0, 0.4, 2.5, 9.0])
    centre, prior = _prior(variances, dof, np.eye(6))
    at_most = np.log(variances).var(ddof=1) * 5 / stats.chi2.ppf(0.1, 5)
    excess = at_most - polygamma(1, own / 2)
    low, high = 1e-3, 1e3
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if polygamma(1, middle) > excess else (low, middle)
    assert prior == pytest.approx(2 * low, rel=1e-8)
    bias = stats.chi2(own).expect(lambda x: np.log(x / own))  # of the logarithm of a variance estimate
    assert centre == pytest.approx(math.exp(np.log(variances).mean() - bias), rel=1e-4)


def test_one_seed_says_nothing() -> None:
    spread = Spread(variance=1.0, prior=math.inf, dof=40)
    assert math.isnan(spread.half_width(Difference(1, 9.0, math.nan)))
    assert fitted([Difference(1, 9.0, math.nan)], np.eye(1)) is None


def test_a_p_value_is_that_of_the_nearer_end_of_what_no_seed_takes_away() -> None:
    """``least`` to either side of no difference, so two tails that lie apart."""
    spread = Spread(variance=0.04, prior=math.inf, dof=12.0, least=0.05)
    error = math.sqrt(0.04 / 4)
    for mean in (0.0, 0.05, 0.2, -0.3):
        tails = stats.t.cdf((0.05 - abs(mean)) / error, 12) + stats.t.cdf((-0.05 - abs(mean)) / error, 12)
        assert spread.p_value(Difference(4, mean, 0.2)) == pytest.approx(min(1.0, tails))


def test_differences_that_do_not_spread_are_certain_where_they_are_more_than_none() -> None:
    spread = Spread(variance=0.0, prior=0.0, dof=4.0, least=0.05)
    for mean, p in ((0.06, 0.0), (-0.06, 0.0), (0.05, 1.0), (0.0, 1.0)):
        assert spread.p_value(Difference(3, mean, 0.0)) == p
    assert spread.p_value(Difference(1, 0.06, math.nan)) == 1.0


def test_the_floor_is_the_two_sided_quantile() -> None:
    spread = Spread(variance=0.04, prior=math.inf, dof=12)
    assert spread.floor(3) == pytest.approx(stats.t.ppf(0.975, 12) * 0.2 / math.sqrt(3))
    assert replace(spread, least=0.5).floor(10**9) == 0.5


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
