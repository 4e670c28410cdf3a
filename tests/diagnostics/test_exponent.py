"""The gate of Kuzmin et al. 2022 (arXiv:2208.09225): which split of 8 bits suits which distribution.

Oracles: the order that the paper publishes, the closed form for evenly spaced values, and the table in the tree.
"""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from altgrad.diagnostics.exponent import DISTRIBUTIONS, best_sqnr_db, samples
from altgrad.formats import Format

COMMITTED = Path(__file__).parents[2] / "reports/exponent_gate.csv"


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return pd.read_csv(COMMITTED)


def order(table: pd.DataFrame, distribution: str) -> list[str]:
    """Return the splits from the best to the worst."""
    rows = table[table.distribution == distribution]
    return list(rows.sort_values("best_db", ascending=False, kind="stable").format)


def test_evenly_spaced_values_suit_the_uniform_distribution_and_each_exponent_bit_costs(table: pd.DataFrame) -> None:
    assert order(table, "uniform") == ["E0M7", "E1M6", "E2M5", "E3M4", "E4M3", "E5M2", "E6M1", "E7M0"]


def test_two_exponent_bits_suit_the_gaussian(table: pd.DataFrame) -> None:
    found = order(table, "gaussian")
    assert found[0] == "E2M5"
    assert found.index("E2M5") < found.index("E3M4") < found.index("E4M3") < found.index("E5M2")


def test_outliers_call_for_exponent_bits(table: pd.DataFrame) -> None:
    best = table.pivot(index="distribution", columns="format", values="best_db").loc[list(DISTRIBUTIONS)]
    bits = {name: int(order(table, name)[0][1]) for name in DISTRIBUTIONS}
    assert bits["uniform"] < bits["gaussian"] < bits["student-t(3)"]
    for wide, even in (("E3M4", "E0M7"), ("E4M3", "E0M7"), ("E3M4", "E2M5")):
        assert (best[wide] - best[even]).is_monotonic_increasing  # the more outliers, the more an exponent gains


def test_the_search_finds_no_less_than_absmax_and_one_grid_is_one_grid(table: pd.DataFrame) -> None:
    assert (table.best_db >= table.absmax_db).all()
    pair = table.pivot(index="distribution", columns="format", values="best_db")
    assert (pair.E0M7 == pair.E1M6).all()  # E1M6's values are four times E0M7's


def test_evenly_spaced_values_have_the_sqnr_of_the_closed_form() -> None:
    x = samples("uniform", 1 << 14)  # on [-1, 1]: signal 1/3, noise step^2 / 12, steps of 2 / 255 at best
    found, _ = best_sqnr_db(x, Format("E0M7", 0, 7))
    assert found == pytest.approx(10 * math.log10((1 / 3) / ((1 / 127) ** 2 / 12)), abs=0.15)


def test_the_table_in_the_tree_is_what_the_command_makes(table: pd.DataFrame) -> None:
    assert list(table.format[:8]) == [f"E{bits}M{7 - bits}" for bits in range(8)]
    row = table[(table.distribution == "student-t(3)") & (table.format == "E2M5")].iloc[0]
    found = best_sqnr_db(samples("student-t(3)"), Format("E2M5", 2, 5))
    assert found == (pytest.approx(row.best_db, abs=0.006), row.best_scale_log2)
