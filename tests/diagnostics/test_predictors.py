"""What predicts the cost of formats. Oracles: SciPy's rank correlation, orders made up to be right, wrong or random."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from altgrad.config import UserError
from altgrad.diagnostics.costs import measured
from altgrad.diagnostics.predictors import agreement, difference, over_formats, predictions
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


def test_orders_are_drawn_of_more_than_eight_formats() -> None:
    a, b = made(1, 10, 7)
    expected = scipy.stats.spearmanr(a[0], b[0], alternative="greater").pvalue  # an approximation
    assert agreement(a, b).p_value == pytest.approx(expected, abs=0.02)
    assert agreement(np.arange(12.0)[None], np.arange(12.0)[None]).p_value < 1e-4


def test_formats_resampled_give_an_interval_to_one_seed() -> None:
    cost = np.arange(12.0)[None]
    right, wrong = agreement(cost, cost, "formats"), agreement(made(1, 12, 1)[0], cost, "formats")
    assert (right.low, right.high) == (1, 1)
    assert wrong.low < 0 < wrong.high
    assert difference(cost, -cost, cost, "formats").decided


def test_a_table_over_formats_says_who_has_the_order_of_all_and_of_8_bits() -> None:
    """Costs that rise with the formats, one predictor right, one wrong only among 8 bits."""
    names = ["E2M1", "E1M2", "E3M0", "E4M3", "E5M2", "E3M4", "E2M5"]
    cost = pd.Series(np.arange(7.0, 0, -1), names)
    other = pd.Series([7.0, 6, 5, 1, 2, 3, 4], names)
    table = over_formats(pd.DataFrame({"sqnr": cost, "fisher": other, "taylor": cost}), cost)
    found = table.set_index(["formats", "predictor"])
    assert list(found["count"].unique()) == [7, 4]
    assert found.rho["all", "sqnr"] == found.rho["8 bits", "taylor"] == 1
    assert found.rho["8 bits", "fisher"] == -1
    assert found.rho["8 bits", "fisher - sqnr"] == -2


def test_measured_costs_are_paired_and_of_formats_alone(tmp_path: Path) -> None:
    rows = [("bf16", 0, 1.0), ("bf16", 1, 3.0), ("virtual.E4M3", 0, 9.0), ("virtual.E4M3", 1, 9.0), ("E3M4", 0, 1.0)]
    for step, name in enumerate(("E4M3", "E5M2", "E2M1")):
        rows += [(name, seed, 2.0 * seed + 1 + step) for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["format", "seed", "val_loss"]).assign(optimizer="adamw", lr_scale=1)
    table.to_csv(tmp_path / "results.csv", index=False)
    assert measured(tmp_path / "results.csv", "adamw", "bf16").to_dict() == {"E4M3": 0, "E5M2": 1, "E2M1": 2}
    with pytest.raises(UserError, match="no cell of E9M9 and adamw"):
        measured(tmp_path / "results.csv", "adamw", "E9M9")
    with pytest.raises(UserError, match="no such file"):
        measured(tmp_path / "absent.csv", "adamw", "bf16")
    table.drop(columns="seed").to_csv(tmp_path / "results.csv", index=False)
    with pytest.raises(UserError, match="no column seed"):
        measured(tmp_path / "results.csv", "adamw", "bf16")


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
