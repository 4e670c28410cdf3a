"""The rule of early stopping. Oracle: means taken by hand."""

from __future__ import annotations

import math

import pytest

from altgrad.config.early_stop import MARGIN, early_loss, is_beaten

ROWS = [(0, None), (10, 9.0), (11, 5.0), (15, 4.0), (20, 3.0), (21, 1.0), (100, 0.5)]


def test_the_losses_of_the_second_tenth_count():
    assert early_loss(ROWS, 100) == pytest.approx((5 + 4 + 3) / 3)
    assert early_loss(ROWS[:5], 100) == pytest.approx(4)


@pytest.mark.parametrize("rows", [[], ROWS[:2], ROWS[:4]])
def test_nothing_is_known_before_a_fifth_of_the_steps(rows):
    assert early_loss(rows, 100) is None


def test_a_run_without_a_finite_loss_there_has_lost_and_one_that_logged_none_is_not_judged():
    assert early_loss([(15, None), (20, None)], 100) == math.inf
    assert early_loss([(5, 1.0), (50, 1.0)], 100) is None


@pytest.mark.parametrize(
    ("own", "rivals", "beaten"),
    [(4.0, [4.0 - MARGIN - 0.01], True), (4.0, [4.0 - MARGIN + 0.01], False), (4.0, [9.0, 3.0, None], True),
     (4.0, [None], False), (4.0, [], False), (None, [1.0], False), (math.inf, [9.0], True), (4.0, [math.inf], False)],
)  # fmt: skip
def test_a_cell_is_beaten_by_the_best_of_those_that_went_as_far(own, rivals, beaten):
    assert is_beaten(own, rivals) == beaten
