"""Where the statistics change their answer. Oracles: SciPy's distributions, just below and above each threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import polygamma

from altgrad.reporting.moderation import Spread, _prior
from altgrad.reporting.statistics import Difference, t_quantile

NEAR = 1e-6


@pytest.mark.parametrize("dof", [1.0, 4.0, 30.0])
def test_intervals_leave_out_one_in_forty_on_either_side(dof: float) -> None:
    assert t_quantile(dof) == pytest.approx(stats.t.ppf(0.975, dof))


@pytest.mark.parametrize("prior", [math.inf, 6.0, 40.0])
@pytest.mark.parametrize(("n", "all_dof"), [(2, 20.0), (5, 20.0), (10, 20.0), (10, 3.0)])
def test_a_spread_that_one_in_twenty_of_the_others_has_stands_alone(prior: float, n: int, all_dof: float) -> None:
    """The F distribution's upper 5 %, at the degrees of freedom that the shared variance is known with."""
    spread = Spread(variance=0.25, prior=prior, dof=all_dof, comparisons=6, seeds=n)
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


def test_a_single_variance_has_no_others_beside_it() -> None:
    assert _prior(np.array([0.3]), np.array([4.0]), np.eye(1)) == (0.3, 0.0)


def test_equal_variances_are_shared_without_end() -> None:
    assert math.isinf(_prior(np.full(5, 0.3), np.full(5, 4.0), np.eye(5))[1])


def test_a_p_value_is_that_of_the_nearer_end_of_what_no_seed_takes_away() -> None:
    """``least`` to either side of no difference, so two tails that lie apart."""
    spread = Spread(variance=0.04, prior=math.inf, dof=12.0, comparisons=4, seeds=4, least=0.05)
    error = math.sqrt(0.04 / 4)
    for mean in (0.0, 0.05, 0.2, -0.3):
        tails = stats.t.cdf((0.05 - abs(mean)) / error, 12) + stats.t.cdf((-0.05 - abs(mean)) / error, 12)
        assert spread.p_value(Difference(4, mean, 0.2)) == pytest.approx(min(1.0, tails))


def test_differences_that_do_not_spread_are_certain_where_they_are_more_than_none() -> None:
    spread = Spread(variance=0.0, prior=0.0, dof=4.0, comparisons=1, seeds=3, least=0.05)
    for mean, p in ((0.06, 0.0), (-0.06, 0.0), (0.05, 1.0), (0.0, 1.0)):
        assert spread.p_value(Difference(3, mean, 0.0)) == p
    assert spread.p_value(Difference(1, 0.06, math.nan)) == 1.0
