"""What is written as a contrast is that sum of losses. Oracle: the sum written out; scipy's t-tests; simulation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from altgrad.config import UserError
from altgrad.reporting.decision_rule import HIGHER, IDENTICAL, INCONCLUSIVE, LOWER, NO_EFFECT, TOO_FEW, judged
from altgrad.reporting.statistics import summarised
from altgrad.reporting.study.answers import Comparison
from altgrad.reporting.study.runs import Run, Runs, parsed
from tests.reporting.study.made_study import rows, write_study

CHANCE = np.random.default_rng(0)
FORMATS, OPTIMIZERS = ("E3M4", "virtual.E3M4", "E4M3"), ("adamw", "spacing_scaled", "rung")
LOSSES = {("one", fmt, optimizer): CHANCE.normal(3.5, 0.1, 6) for fmt in FORMATS for optimizer in OPTIMIZERS}
LOSSES |= {("two", "E3M4", optimizer): CHANCE.normal(3.5, 0.1, 6) for optimizer in OPTIMIZERS}


@pytest.fixture
def runs(tmp_path) -> Runs:
    return Runs.read(write_study(tmp_path, rows(LOSSES)) / "results")


def at(experiment: str, fmt: str, optimizer: str) -> np.ndarray:
    return LOSSES[experiment, fmt, optimizer]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rung - adamw in E3M4", lambda: at("one", "E3M4", "rung") - at("one", "E3M4", "adamw")),
        ("adamw in E4M3 - E3M4", lambda: at("one", "E4M3", "adamw") - at("one", "E3M4", "adamw")),
        (
            "rung - adamw in E3M4 - virtual.E3M4",
            lambda: at("one", "E3M4", "rung") - at("one", "E3M4", "adamw")
            - at("one", "virtual.E3M4", "rung") + at("one", "virtual.E3M4", "adamw"),
        ),
        ("rung in E3M4 of two - one", lambda: at("two", "E3M4", "rung") - at("one", "E3M4", "rung")),
        (
            "0.5*rung + 0.5*adamw - spacing_scaled in E3M4",
            lambda: (at("one", "E3M4", "rung") + at("one", "E3M4", "adamw")) / 2 - at("one", "E3M4", "spacing_scaled"),
        ),
    ],
)  # fmt: skip
def test_a_contrast_is_the_sum_that_it_says(runs, text, expected):
    found = runs.by_seed(parsed([text], ["one"], runs))
    np.testing.assert_allclose(found, expected(), atol=1e-12)


def test_a_run_is_taken_from_the_first_experiment_that_has_it(runs):
    assert parsed(["rung in E3M4"], ["two", "one"], runs) == {Run("two", "E3M4", "rung"): 1}
    assert parsed(["rung in E4M3"], ["two", "one"], runs) == {Run("one", "E4M3", "rung"): 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rung minus adamw", "write it as `optimizer - optimizer in format`"),
        ("rung - -adamw in E3M4", "'-adamw' is no name"),
        ("rang in E3M4", "no run of optimizer 'rang'; did you mean rung"),
        ("rung in E3M5", "no run of format 'E3M5'; did you mean E3M4"),
        ("rung in E3M4 at pruned-50", "no run of rung in E3M4 at pruned-50"),
    ],
)
def test_what_is_no_contrast_of_these_runs_is_refused(runs, text, words):
    with pytest.raises(UserError, match=words):
        parsed([text], ["one"], runs)


def test_a_seed_without_a_loss_of_one_of_the_runs_is_left_out(tmp_path):
    losses = LOSSES | {("one", "E3M4", "rung"): np.where(np.arange(6) == 2, np.nan, at("one", "E3M4", "rung"))}
    runs = Runs.read(write_study(tmp_path, rows(losses)) / "results")
    found = runs.difference(parsed(["rung - adamw in E3M4"], ["one"], runs))
    kept = np.delete(at("one", "E3M4", "rung") - at("one", "E3M4", "adamw"), 2)
    assert found is not None and found.n == 5 and found.mean == pytest.approx(kept.mean())


def test_one_family_by_itself_is_student_and_holm():
    differences = [CHANCE.normal(shift, 0.01, 6) for shift in (-0.02, -0.01, 0.0)]
    results = judged({i: summarised(values) for i, values in enumerate(differences)})
    p = [stats.ttest_1samp(values, 0).pvalue for values in differences]
    order = np.argsort(p)
    holm = np.maximum.accumulate([min(1, (3 - i) * p[j]) for i, j in enumerate(order)])
    for i, j in enumerate(order):
        low, high = stats.t.interval(0.95, 5, differences[j].mean(), stats.sem(differences[j]))
        assert results[j].alone == pytest.approx(p[j]) and results[j].adjusted == pytest.approx(holm[i])
        assert results[j].half_width == pytest.approx((high - low) / 2)


def test_the_visible_effect_is_found_nine_times_in_ten():
    result = judged({0: summarised(np.array([-2.0, -1, 0, 1, 2]))})[0]
    drawn = CHANCE.normal(result.visible, result.difference.sd, (20_000, 5))
    assert (stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.9, abs=0.01)


SPREAD = np.array([-1.0, -0.5, 0, 0.5, 1])


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        (SPREAD * 1e-3 - 0.01, LOWER), (SPREAD * 1e-3 + 0.01, HIGHER),
        (SPREAD * 1e-3, NO_EFFECT), (SPREAD * 1e-2, INCONCLUSIVE),
        (SPREAD[:4] * 1e-3 - 0.01, TOO_FEW), (SPREAD * 0, IDENTICAL),
    ],
)  # fmt: skip
def test_what_a_difference_amounts_to(values, outcome):
    assert judged({0: summarised(values)})[0].outcome == outcome


@pytest.mark.parametrize(("expected", "met"), [("no effect", True), ("not significant", True), ("lower", False)])
def test_runs_that_are_equal_to_the_last_bit_show_that_there_is_no_effect(expected, met):
    found = Comparison("", [], {}, judged({0: summarised(SPREAD * 0)})[0], expected)
    assert found.as_expected is met


def test_a_rule_that_was_registered_with_three_seeds_keeps_them():
    values = np.array([-0.010, -0.0101, -0.0099])
    assert judged({0: summarised(values)}, 2)[0].outcome == LOWER
    assert judged({0: summarised(values)})[0].outcome == TOO_FEW


def test_no_comparison_of_a_family_changes_the_interval_of_another():
    """By its own spread alone: one that is a million times as wide leaves them as they were."""
    differences = {i: summarised(CHANCE.normal(0, 0.01, 5)) for i in range(6)}
    wild = judged(differences | {0: summarised(CHANCE.normal(0, 1e4, 5))})
    assert all(wild[i].half_width == result.half_width for i, result in judged(differences).items() if i)


def test_the_committed_tables_are_as_they_are_written(tmp_path):
    """So that a run that is trained adds a line and changes no other."""
    place = Path(__file__).parents[3] / "reports/study/results"
    Runs.read(place).write(tmp_path)
    for name in ("runs.csv", "after_training.csv"):
        assert (tmp_path / name).read_text() == (place / name).read_text(), name
