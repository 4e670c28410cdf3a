"""Which runs fail. Oracles: counts by hand; SciPy for Wilson's interval."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from altgrad.formats import get_format
from altgrad.reporting.compare import compare
from altgrad.reporting.failures import failed, failures, limit_of
from altgrad.reporting.load import Study
from altgrad.reporting.statistics import wilson
from altgrad.reporting.wording import percent_of
from tests.reporting.made_losses import ADAMW, study_of

ARMS = {"adamw": ADAMW, "adamw_sr": ADAMW | {"weights": "quantized", "rounding": "stochastic"}}
VOCABULARY = 1024
LIMIT = (math.log(VOCABULARY) + 3.0) / 2  # E4M3's best mean is 3.0


def study(entry: str = "E7M0", fine: float | None = LIMIT - 0.01, bad: float | None = LIMIT + 0.01) -> Study:
    """Two arms at two rates and two seeds; ``entry`` works at the first rate and fails at the second."""
    losses = {("E4M3", arm, rate): [3.0 + 0.5 * (rate > 1)] * 2 for arm in ARMS for rate in (1, 4)}
    losses |= {(entry, arm, rate): [fine, fine] if rate == 1 else [bad, None] for arm in ARMS for rate in (1, 4)}
    found = study_of(losses, ARMS, baseline="E4M3")
    found.corpus["vocab_size"] = VOCABULARY
    for cell in found.resolved.values():
        fmt = get_format(cell["format"])
        cell["formats"] = {fmt.name: {
            "name": fmt.name, "exponent_bits": fmt.exponent_bits, "mantissa_bits": fmt.mantissa_bits,
        }}  # fmt: skip
    return found


@pytest.mark.parametrize(("count", "total"), [(0, 15), (3, 30), (30, 30), (82, 93)])
def test_wilsons_interval_is_that_of_scipy(count: int, total: int) -> None:
    expected = stats.binomtest(count, total).proportion_ci(method="wilson")
    assert wilson(count, total) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_run_fails_beyond_the_middle_between_knowing_nothing_and_the_baselines_best() -> None:
    assert limit_of(VOCABULARY, 3.0) == LIMIT
    fails = failed(study())
    assert fails[fails].index.tolist() == [f"E7M0-{arm}-{seed}-4" for arm in ARMS for seed in (0, 1)]
    assert not failed(study(bad=LIMIT - 0.01))["E7M0-adamw-0-4"]


def test_an_arm_in_which_the_baseline_diverged_is_judged_by_its_best_in_another() -> None:
    found = study()
    mine = (found.cells["format"] == "E4M3") & (found.cells["optimizer"] == "adamw_sr")
    found.cells.loc[mine, ["status", "val_loss"]] = ["diverged", float("nan")]
    fails = failed(found)
    assert fails[mine].all() and fails[~mine].equals(failed(study())[~mine])


def test_without_a_run_of_the_baseline_nothing_is_said() -> None:
    found = study()
    found.cells.loc[found.cells["format"] == "E4M3", ["status", "val_loss"]] = ["diverged", float("nan")]
    assert failures(found, compare(found)) == []


def test_a_table_has_the_lowest_rate_at_which_most_fail() -> None:
    (table,) = failures(study(), compare(study()))
    rows = {(row[0], row[1]): row[2:4] for row in table.rows}
    assert rows["**E7M0**", "`adamw`"] == [percent_of(2, 4), "4 times"]
    assert rows["**E4M3**", "`adamw`"] == [percent_of(0, 4), "none"]


def test_where_nothing_fails_the_report_is_silent() -> None:
    calm = study("E5M2", fine=3.0, bad=3.2)
    calm.cells.loc[calm.cells["status"] == "diverged", ["status", "val_loss"]] = ["completed", 3.2]
    assert failures(calm, compare(calm)) == []
