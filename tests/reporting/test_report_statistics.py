"""Laws of the statistics. Oracles: scipy.stats, the closed form of a two-way table, simulation."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting.statistics import Difference, kl_divergence, noise, paired_difference, rank_correlation


def table(arms: int, seeds: int, *, sd: float = 1.0, key: int = 0) -> pd.DataFrame:
    """Return losses with an effect per arm, one per seed, and noise."""
    random = np.random.default_rng(key)
    effects = random.normal(size=(arms, 1)) + 5 * random.normal(size=(1, seeds))
    return pd.DataFrame(effects + sd * random.normal(size=(arms, seeds)))


@pytest.mark.parametrize("seeds", [2, 3, 5, 12])
def test_paired_difference_is_scipys_paired_t_interval(seeds: int) -> None:
    losses = table(2, seeds)
    found = paired_difference(losses.loc[0], losses.loc[1])
    oracle = stats.ttest_rel(losses.loc[0], losses.loc[1])
    low, high = oracle.confidence_interval(0.95)
    assert found.n == seeds
    assert [found.low, found.high] == pytest.approx([low, high], rel=1e-9)
    assert found.excludes_zero == (oracle.pvalue < 0.05)


def test_only_seeds_that_both_have_are_paired() -> None:
    a = pd.Series({0: 1.0, 1: 2.0, 2: 4.0})
    b = pd.Series({1: 1.5, 2: 3.0, 3: 9.0})
    found = paired_difference(a, b)
    assert (found.n, found.mean) == (2, 0.75)


def test_one_seed_has_no_interval_and_none_has_no_difference() -> None:
    one = paired_difference(pd.Series({0: 1.0}), pd.Series({0: 0.25}))
    assert (one.n, one.mean) == (1, 0.75) and math.isnan(one.low) and not one.excludes_zero
    assert paired_difference(pd.Series({0: 1.0}), pd.Series({1: 1.0})) is None


def test_negation_turns_a_difference_round() -> None:
    losses = table(2, 4)
    assert -paired_difference(losses.loc[0], losses.loc[1]) == paired_difference(losses.loc[1], losses.loc[0])


def test_noise_is_the_residual_of_the_two_way_table() -> None:
    losses = table(6, 4)
    values = losses.to_numpy()
    residual = values - values.mean(1, keepdims=True) - values.mean(0, keepdims=True) + values.mean()
    dof = (6 - 1) * (4 - 1)
    found = noise([losses])
    assert found.dof == dof
    assert found.sd == pytest.approx(math.sqrt((residual**2).sum() / dof), rel=1e-9)
    assert found.floor(4) == pytest.approx(stats.t.ppf(0.975, dof) * found.sd * math.sqrt(2 / 4), rel=1e-9)


def test_noise_ignores_what_a_seed_or_an_arm_adds() -> None:
    losses = table(5, 3)
    shifted = losses + 10 * np.arange(3) + 100 * np.arange(5)[:, None]
    assert noise([shifted]).sd == pytest.approx(noise([losses]).sd, rel=1e-6)


def test_two_arms_and_two_seeds_give_the_spread_of_their_two_differences() -> None:
    losses = table(2, 2)
    differences = losses.loc[0] - losses.loc[1]
    assert noise([losses]).sd == pytest.approx(differences.std(ddof=1) / math.sqrt(2), rel=1e-9)


def test_groups_are_pooled_by_their_degrees_of_freedom() -> None:
    a, b = table(4, 3, sd=1, key=1), table(6, 5, sd=3, key=2)
    pooled, one, two = noise([a, b]), noise([a]), noise([b])
    assert pooled.dof == one.dof + two.dof
    assert pooled.sd**2 * pooled.dof == pytest.approx(one.sd**2 * one.dof + two.sd**2 * two.dof, rel=1e-9)


def test_an_arm_that_repeats_another_adds_no_freedom() -> None:
    losses = table(4, 3)
    twice = pd.concat([losses, losses.loc[[2]].rename({2: 9})])
    assert noise([twice]) == noise([losses])


def test_missing_runs_cost_a_degree_of_freedom_each() -> None:
    losses = table(5, 4)
    losses.iloc[1, 2] = losses.iloc[3, 0] = np.nan
    assert noise([losses]).dof == 4 * 3 - 2


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (0, 0)])
def test_one_seed_or_one_arm_gives_no_noise_floor(shape: tuple[int, int]) -> None:
    assert noise([table(*shape)]) is None


def test_equal_arms_exceed_the_floor_one_time_in_twenty() -> None:
    """Simulation: 2,000 grids of four equal arms and three seeds; binomial 4 sigma is 2 %."""
    random = np.random.default_rng(7)
    exceeded = 0
    for _ in range(2000):
        losses = pd.DataFrame(random.normal(size=(1, 3)) + 0.1 * random.normal(size=(4, 3)))
        difference = paired_difference(losses.loc[0], losses.loc[1])
        exceeded += abs(difference.mean) > noise([losses]).floor(3)
    assert abs(exceeded / 2000 - 0.05) < 0.02


def test_an_unstable_arm_is_left_out_and_counted() -> None:
    quiet, wild = table(6, 3, key=1), table(1, 3, sd=1000, key=2).rename({0: 9})
    found = noise([pd.concat([quiet, wild]), table(4, 3, key=3)])
    without = noise([quiet, table(4, 3, key=3)])
    assert found.unstable == 1 and without.unstable == 0
    assert (found.sd, found.dof, found.arms) == (without.sd, without.dof, without.arms)


def test_a_noisy_difference_is_held_against_its_own_spread() -> None:
    found = paired_difference(pd.Series([1.0, 5.0, 0.0]), pd.Series([0.0, 0.0, 0.0]))
    own = stats.t.ppf(0.975, 40) * stats.sem([1.0, 5.0, 0.0])
    assert found.own_floor(40) == pytest.approx(own)
    assert Difference(1, 0.5, math.nan, math.nan).own_floor(40) == 0


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


def test_a_difference_holds_the_interval_of_its_own_mean() -> None:
    assert Difference(3, 0.5, 0.1, 0.9).excludes_zero
    assert not Difference(3, 0.5, -0.1, 1.1).excludes_zero


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_the_seeds_needed_bring_the_floor_down_and_one_fewer_do_not(share: float) -> None:
    found = noise([table(6, 2)])
    target = share * found.floor(2)
    n = found.seeds_for(target)
    per_seed = found.dof / (found.seeds - 1)  # degrees of freedom that each further seed adds
    floors = [stats.t.ppf(0.975, per_seed * (k - 1)) * found.sd * math.sqrt(2 / k) for k in (n - 1, n) if k > 1]
    assert floors[-1] <= target and (n == 2 or floors[0] > target)
    assert found.seeds_for(found.sd / 1000) is None
