"""Laws of the statistics of one comparison. Oracle: scipy.stats."""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from altgrad.reporting.runs import Runs
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
    rows = [(name, "adamw", 1.0, i, float(x)) for name, own in (("a", a), ("b", b)) for i, x in enumerate(own)]
    found = Runs.of_losses(rows, range(len(base))).difference({("b", "adamw", 1.0): 1, ("a", "adamw", 1.0): -1})
    differences = [y - x for x, y in zip(a, b, strict=True)]
    assert (found.sd == 0) == (len(set(differences)) == 1)
    assert found.is_zero == (not any(differences))
    assert found.mean == pytest.approx(float(sum(differences) / len(differences)), abs=1e-9 * float(max(a)))


def test_only_equal_losses_are_no_difference_at_all() -> None:
    assert Difference(2, 0.0, 0.0).is_zero and Difference(1, 0.0, math.nan).is_zero
    assert not Difference(2, 0.0, 0.1).is_zero and not Difference(2, 0.1, 0.0).is_zero


@pytest.mark.parametrize("dof", [1.0, 4.0, 30.0])
def test_intervals_leave_out_one_in_forty_on_either_side(dof: float) -> None:
    assert t_quantile(dof) == pytest.approx(stats.t.ppf(0.975, dof))
