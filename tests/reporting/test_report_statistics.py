"""Laws of the statistics of one comparison. Oracle: scipy.stats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from altgrad.reporting.statistics import Difference, summarised, t_quantile


def test_a_difference_is_the_mean_and_spread_of_the_seeds_that_both_have() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 6))
    b[4] = np.nan
    found, known = summarised(a - b), np.isfinite(b)
    assert found.n == 5
    oracle = stats.ttest_rel(a[known], b[known])
    assert found.mean / (found.sd / math.sqrt(5)) == pytest.approx(oracle.statistic, rel=1e-9)


def test_one_seed_has_no_spread_and_none_has_no_difference() -> None:
    one = summarised(np.array([0.75, np.nan]))
    assert (one.n, one.mean) == (1, 0.75) and math.isnan(one.sd)
    assert summarised(np.array([np.nan])) is None


def test_only_equal_losses_are_no_difference_at_all() -> None:
    assert Difference(2, 0.0, 0.0).is_zero and Difference(1, 0.0, math.nan).is_zero
    assert not Difference(2, 0.0, 0.1).is_zero and not Difference(2, 0.1, 0.0).is_zero


@pytest.mark.parametrize("dof", [1.0, 4.0, 30.0])
def test_intervals_leave_out_one_in_forty_on_either_side(dof: float) -> None:
    assert t_quantile(dof) == pytest.approx(stats.t.ppf(0.975, dof))
