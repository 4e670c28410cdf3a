"""What a report says to run next. Oracle: the study with those seeds has an interval about half as wide."""

from __future__ import annotations

import re

import numpy as np
import pytest

from altgrad.reporting.claims import BEYOND, GAIN, Questions, ask
from altgrad.reporting.compare import Comparison, compare
from altgrad.reporting.load import DIVERGED, Study
from altgrad.reporting.next_seeds import next_seeds, widest
from tests.reporting.made_losses import ADAMW, STIFF, study_of

ARMS = {"adamw": ADAMW, "stiff": STIFF}


def losses(seeds: int, own: float = 0.0, noise: float = 1e-3) -> dict:
    """Return losses of a grid: `stiff` gains 0.02 with any geometry."""
    rng = np.random.default_rng(0)

    def of(level: float) -> list[float]:
        return list(3.0 + level + noise * rng.standard_normal(seeds))

    found = {("bf16", "adamw"): of(0), ("bf16", "stiff"): of(0)}
    for fmt in ("E4M3", "E3M4"):
        for entry in (fmt, f"virtual.{fmt}"):
            found[entry, "adamw"] = of(0.01)
            found[entry, "stiff"] = of(-0.01 - own * (entry == fmt))
    return found


def asked(study: Study, comparison: Comparison) -> Questions:
    return ask(study, comparison.best_runs, comparison.references)


def test_the_seeds_that_are_named_halve_the_interval():
    study = study_of(losses(40), ARMS)
    comparison = compare(study)
    question, claim = widest(comparison, asked(study, comparison))
    assert question[0] == BEYOND
    text = next_seeds(study, comparison)
    own = question[1]
    assert f"what is **{own}**'s own in the gain of `stiff`, ±{claim.half_width:.4f}" in text
    settings = dict(re.findall(r"grid\.(\w+)=\[([^\]]*)\]", text))
    assert set(settings["formats"].split(",")) == {own, f"virtual.{own}"}
    assert settings["optimizers"] == "adamw,stiff"
    seeds = list(map(int, settings["seeds"].split(",")))
    assert seeds == list(range(160)) and "480 new cells" in text and f"-S grid.baseline={own}" in text
    again = compare(study_of(losses(160), ARMS)).answers.of(*question)
    assert again.half_width == pytest.approx(claim.half_width / 2, rel=0.2)


def test_where_own_parts_are_told_apart_the_next_kind_of_question_counts():
    study = study_of(losses(8, own=0.05, noise=1e-4), ARMS)
    comparison = compare(study)
    assert not any(found[0] == BEYOND for found in filter(None, [widest(comparison, asked(study, comparison))]))
    assert comparison.answers.of(BEYOND, "E4M3", "stiff").told_apart


def test_nothing_is_said_where_nothing_can_be(tmp_path):
    study = study_of({("bf16", "adamw"): [3.0, 3.1]}, {"adamw": ADAMW})
    assert next_seeds(study, compare(study)) == ""


def test_seeds_that_diverged_in_one_run_are_counted_on_to_do_so_again():
    """Two pairs of ten seeds: eight pairs, for half the width, take forty where as many diverge."""
    rng = np.random.default_rng(1)
    baseline, plain = (list(3 + level + 1e-3 * rng.standard_normal(10)) for level in (0, 0.1))
    made = {
        ("bf16", "adamw"): baseline, ("bf16", "stiff"): [None] * 10, ("E4M3", "adamw"): plain,
        ("E4M3", "stiff"): [plain[0] - 2e-3, plain[1] + 1e-3, *[None] * 8],
    }  # fmt: skip
    study = study_of(made, ARMS)
    text = next_seeds(study, compare(study))
    assert "takes 40 seeds, if again 2 of 10 complete all runs: `dvc" in text and "60 new cells" in text


def test_a_run_that_diverged_early_takes_no_time_off_the_others():
    made = losses(5)
    made["E4M3", "stiff"][0] = made["E3M4", "stiff"][0] = None  # whichever is the widest
    study = study_of(made, ARMS)
    study.timing.update({
        key: {"total_s": 1.0 if cell["status"] == DIVERGED else 100.0} for key, cell in study.cells.iterrows()
    })  # fmt: skip
    assert "new cells of about 100 s each" in next_seeds(study, compare(study))


def test_a_question_of_which_nothing_is_ever_firm_asks_for_no_seeds():
    """What a null arm gains by itself is exploratory, and here by far the widest."""
    rng = np.random.default_rng(2)
    arms = ARMS | {"null": STIFF | {"stiffness": "permuted"}}
    made = {
        (entry, arm): list(3 + (0.05 if arm == "null" else 1e-3) * rng.standard_normal(6))
        for entry in ("bf16", "E4M3") for arm in arms
    }  # fmt: skip
    study = study_of(made, arms)
    comparison = compare(study)
    gains = {q: claim.half_width for q, claim in comparison.answers.claims.items() if q[0] == GAIN}
    assert max(gains, key=gains.get)[2] == "null"
    assert widest(comparison, asked(study, comparison))[0] == (GAIN, "E4M3", "stiff")
