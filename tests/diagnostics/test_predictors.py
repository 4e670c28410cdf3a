"""What predicts the cost of formats. Oracles: SciPy's rank correlation, orders made up to be right, wrong or random."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from altgrad.diagnostics.predictors import agreement, difference, predictions
from altgrad.diagnostics.what_if import SPLITS, what_if
from tests.diagnostics.test_what_if import layer


def made(seeds: int, formats: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.normal(size=(seeds, formats)), draw.normal(size=(seeds, formats))


def test_the_correlation_is_scipys_of_the_means_over_seeds() -> None:
    for seed in range(10):
        a, b = made(4, 7, seed)
        expected = scipy.stats.spearmanr(a.mean(0), b.mean(0)).statistic
        assert agreement(a, b).rho == pytest.approx(expected)


def test_the_p_value_counts_orders() -> None:
    rising = np.arange(5.0)[None]
    assert agreement(rising, rising).p_value == pytest.approx(1 / math.factorial(5))
    assert agreement(-rising, rising).p_value == 1
    assert math.isnan(agreement(np.arange(9.0)[None], np.arange(9.0)[None]).p_value)


def test_p_values_are_even_where_there_is_nothing() -> None:
    found = [agreement(*made(1, 6, seed)).p_value for seed in range(150)]
    assert scipy.stats.kstest(found, "uniform").pvalue > 1e-3


def test_a_predictor_with_the_order_right_beats_one_with_it_wrong() -> None:
    _, noise = made(6, 5)
    cost = np.arange(5.0) + 0.1 * noise
    found = difference(cost, -cost, cost)
    assert (found.value, found.decided) == (2, True)
    same = difference(cost, cost, cost)
    assert (same.value, same.decided) == (0, False)


def test_an_interval_is_around_the_value_and_needs_two_seeds() -> None:
    a, b = made(5, 6, 3)
    found = agreement(a, a + 0.3 * b)
    assert found.low <= found.rho <= found.high
    one = agreement(a[:1], b[:1])
    assert math.isnan(one.low) and math.isnan(one.high)


def test_an_order_takes_three_formats() -> None:
    with pytest.raises(ValueError, match="three at least"):
        agreement(*made(3, 2))
    with pytest.raises(ValueError, match="alike"):
        agreement(made(3, 4)[0], made(2, 4)[0])


def test_predictions_are_of_weights_and_of_inputs_but_the_heads() -> None:
    layers = {"blocks.0.mlp.up": layer(0), "head": layer(5)}
    table = what_if(layers, granularities=("tensor",), roundings=("nearest-even",))
    found = predictions(table)
    assert list(found.index) == list(SPLITS)
    rows = table[table.format == "E4M3"].set_index(["layer", "role"])
    used = [("blocks.0.mlp.up", "weight"), ("blocks.0.mlp.up", "input"), ("head", "weight")]
    assert found.fisher["E4M3"] == pytest.approx(sum(rows.loss_second[key] for key in used))
    assert found.taylor["E4M3"] == pytest.approx(sum(rows.loss_second[k] + rows.loss_first[k] for k in used))
    assert found.sqnr["E4M3"] == pytest.approx(-np.mean([rows.sqnr_db[key] for key in used]))
