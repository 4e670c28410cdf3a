"""Laws of the statistics of one comparison. Oracle: scipy.stats."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting.statistics import Difference, kl_divergence, rank_correlation, summarised


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


def test_negation_turns_a_difference_round() -> None:
    differences = np.random.default_rng(1).standard_normal(4)
    assert -summarised(differences) == summarised(-differences)


def test_only_equal_losses_are_no_difference_at_all() -> None:
    assert Difference(2, 0.0, 0.0).is_zero and Difference(1, 0.0, math.nan).is_zero
    assert not Difference(2, 0.0, 0.1).is_zero and not Difference(2, 0.1, 0.0).is_zero


def test_kl_divergence_is_scipys_relative_entropy_in_bits() -> None:
    random = np.random.default_rng(1)
    p, q = (pd.Series(random.random(40), index=np.arange(40) / 4) for _ in range(2))
    assert kl_divergence(p, q) == pytest.approx(stats.entropy(p, q, base=2), rel=1e-4)


def test_kl_divergence_of_a_histogram_from_itself_is_zero() -> None:
    p = pd.Series({-3.0: 0.25, -2.0: 0.0, -1.75: 0.75})
    assert kl_divergence(p, p) == 0


def test_kl_divergence_is_never_negative_nor_infinite() -> None:
    p, q = pd.Series({0.0: 1.0}), pd.Series({1.0: 1.0})
    assert kl_divergence(p, q) == pytest.approx(math.log2(1e6))
    assert math.isnan(kl_divergence(p, pd.Series(dtype="float64")))
    random = np.random.default_rng(2)
    for _ in range(50):
        a, b = (pd.Series(random.random(6), index=random.choice(12, 6, replace=False)) for _ in range(2))
        assert 0 <= kl_divergence(a, b) < 20


def test_rank_correlation_is_scipys_spearman_with_ties() -> None:
    x, y = pd.Series([1.0, 2.0, 2.0, 5.0, np.nan]), pd.Series([3.0, 1.0, 4.0, 4.0, 0.0])
    rho, n = rank_correlation(x, y)
    assert n == 4
    assert rho == pytest.approx(stats.spearmanr(x[:4], y[:4]).statistic)
    assert math.isnan(rank_correlation(x[:2], y[:2])[0])
