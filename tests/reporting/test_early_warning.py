"""Early warning. Oracles: runs made so that a known feature decides, or none does; counts by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from altgrad.reporting.early_warning import FEATURES, MARGIN, SEEN, UNSEEN, Score, Verdict, examples, judge, sentences
from altgrad.reporting.load import IDENTITY
from tests.reporting.made_losses import ADAMW, study_of

FORMATS = ("E4M3", "E5M2", "E6M1", "E7M0")


def made(fails, seed: int = 0, runs: int = 60) -> pd.DataFrame:
    """Random features; ``fails`` tells of a row and the generator whether it does."""
    random = np.random.default_rng(seed)
    table = pd.DataFrame(random.standard_normal((runs * len(FORMATS), len(FEATURES))), columns=list(FEATURES))
    table.insert(0, "format", np.repeat(FORMATS, runs))
    table.insert(1, "lr_scale", np.tile([0.25, 1.0, 4.0, 16.0], len(table) // 4))
    table.insert(2, "fails", [bool(fails(row, random)) for row in table.to_dict("records")])
    return table


def test_what_decides_is_found_and_the_trivial_rule_does_not_see_it() -> None:
    verdict = judge(made(lambda row, _: row["growth"] > 0.8))
    assert verdict.p < 1e-6
    for found, of in (verdict.score.precision, verdict.score.recall):
        assert found / of > 0.85
    assert ": the score beats the trivial rule" in sentences(verdict)[0]


def test_where_the_loss_decides_the_score_does_not_beat_it() -> None:
    verdict = judge(made(lambda row, _: row["loss"] > 0.8))
    assert verdict.trivial.recall[0] / verdict.trivial.recall[1] > 0.9
    assert "beats" not in sentences(verdict)[0]


def test_of_noise_precision_is_the_base_rate() -> None:
    table = made(lambda row, random: random.random() < 0.3, runs=300)
    verdict = judge(table)
    right, warned = verdict.score.precision
    assert abs(right / warned - table["fails"].mean()) < 0.08


def test_a_format_is_judged_by_what_others_teach() -> None:
    """Of two formats that go opposite ways nothing is right; had a format taught its own rule, half would be."""
    table = made(lambda row, _: (row["growth"] > 0) == (row["format"] == "E4M3"))
    verdict = judge(table[table["format"].isin(["E4M3", "E5M2"])])
    assert verdict.score.warned_failed + verdict.score.silent_fine < 0.1 * verdict.runs


def test_a_score_that_knows_the_rate_and_not_the_fault_is_found_out() -> None:
    """A feature tells the rate, and which rates fail follows nothing: all of it is known, or none of it."""
    table = made(lambda _row, _random: False)
    table["fails"] = table["lr_scale"].isin([1.0, 16.0])
    for rate, name in zip((0.25, 1.0, 4.0, 16.0), ("fall", "gradient", "growth", "clipped"), strict=True):
        table[name] = (table["lr_scale"] == rate).astype(float)
    formats, both = judge(table, ("format",)), judge(table, UNSEEN)
    right = [verdict.score.warned_failed + verdict.score.silent_fine for verdict in (formats, both)]
    assert right[0] == formats.runs and right[1] < 0.6 * both.runs
    assert "Judged on formats and rates that taught it nothing" in sentences(both)[0]


def test_what_carries_over_to_other_rates_is_found_there_too() -> None:
    verdict = judge(made(lambda row, _: row["growth"] > 0.8), UNSEEN)
    assert ": the score beats the trivial rule" in sentences(verdict)[0]


def test_a_run_fails_that_diverges_later_or_ends_far_above_its_best_rate() -> None:
    losses = {("E4M3", "adamw", 1): [3.0, 3.0], ("E4M3", "adamw", 4): [3.0 + 0.9 * MARGIN, 3.0 + 1.1 * MARGIN],
              ("E4M3", "adamw", 16): [None, None]}  # fmt: skip
    study = study_of(losses, {"adamw": ADAMW}, baseline="E4M3")
    study.cells.loc["E4M3-adamw-1-16", "steps"] = SEEN * 10  # diverged before there was anything to warn of
    rows = [
        [*(cell[name] for name in IDENTITY), step, 6.0 - step, 2.0 * step, 0.5]
        for cell in study.cells.reset_index().to_dict("records")
        for step in (1, 2, 9)
    ]
    study.__dict__["history"] = pd.DataFrame(
        rows, columns=[*IDENTITY, "step", "train_loss", "grad_norm", "clipped_frac"]
    )
    table = examples(study)
    assert table["fails"].tolist() == [False, False, True, False, True]  # in the order of the cells: seed by seed
    first = table.iloc[0]
    assert (first["loss"], first["fall"], first["clipped"]) == (4.0, 1.0, 0.5)
    assert (first["gradient"], first["growth"]) == pytest.approx((np.log(4.0), np.log(2.0)))


def test_nothing_is_judged_without_both_kinds_or_two_formats() -> None:
    assert judge(made(lambda row, _: False)) is None
    assert judge(made(lambda row, _: row["loss"] > 0).query("format == 'E4M3'")) is None
    assert judge(made(lambda row, _: row["loss"] > 0).query("lr_scale == 4"), UNSEEN) is None


def test_the_sentences_have_the_counts() -> None:
    text = " ".join(sentences(Verdict(Score(8, 2, 4, 6), Score(0, 0, 12, 8), 0.2, 20, ("format",))))
    assert "Score: precision 8 of 10 [49 %, 94 %], recall 8 of 12 [39 %, 86 %]" in text
    assert "Loss alone: precision of nothing, recall 0 of 12" in text
