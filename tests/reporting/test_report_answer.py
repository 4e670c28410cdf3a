"""The answer says what the numbers allow and no more. Oracle: what each made-up grid contains."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from altgrad.reporting.answer import answer
from altgrad.reporting.compare import compare
from altgrad.reporting.control import check_twins
from altgrad.reporting.document import Bullets
from altgrad.reporting.load import Study
from altgrad.reporting.simulated import Rates
from tests.reporting.made_losses import ADAMW, STIFF, study_of
from tests.reporting.synthetic_project import SMALL, read, write_project


def said(study: Study) -> str:
    """Return the answer's text, a line per sentence or bullet."""
    lines = []
    for block in answer(study, compare(study), check_twins(study)):
        lines += block.items if isinstance(block, Bullets) else [block.text]
    return "\n".join(lines)


@pytest.fixture
def answered(made: Callable[..., Study]) -> Callable[..., str]:
    return lambda *args, **settings: said(made(*args, **settings))


def test_with_plain_arms_only_the_question_stays_open(study) -> None:
    text = said(study)
    assert "**Open.** No geometry-aware arm is in this grid" in text
    assert "gains most" not in text


def test_the_answer_names_seeds_floor_and_counts(study) -> None:
    text = said(study)
    assert "**1 to 2 paired seeds** in each comparison: a claim takes 5, fewer give an indication" in text
    assert "**A/A noise floor** 0.0" in text
    assert "7 formats × 1 arm × 2 seeds = 14 cells, 12 completed, 1 diverged and 1 missing" in text


def test_what_is_not_told_apart_is_called_that_and_not_equal() -> None:
    random = np.random.default_rng(0)
    levels = {"bf16": 3.5, "E3M4": 3.5, "E5M2": 3.5, "E7M0": 4.0}
    losses = {(entry, "adamw"): level + 0.01 * random.standard_normal(5) for entry, level in levels.items()}
    text = said(study_of(losses, {"adamw": ADAMW}))
    line = next(line for line in text.splitlines() if line.startswith("Not told apart from the baseline"))
    assert "**E3M4**" in line and "E7M0" not in line and "no difference" not in text


def test_rates_chosen_on_the_same_seeds_are_said_to_be(answered) -> None:
    text = answered(["bf16", "E7M0"], seeds=range(5), lr_scales=(0.5, 1, 2))
    assert "**The learning rates were chosen on these seeds**" in text
    assert "Higher loss, as an indication: **E7M0**" in text


def test_the_share_of_false_claims_in_simulation_is_quoted(study) -> None:
    blocks = answer(study, compare(study), None, Rates(5, 2, 2, 0.0123, 0.09))
    text = " ".join(block.text for block in blocks if not isinstance(block, Bullets))
    assert "5 formats × 2 arms × 2 seeds" in text and "1.2 % of the reports" in text and "9 % have" in text


def test_lost_cells_are_named(study) -> None:
    text = said(study)
    assert "Diverged: **E7M0** (1 of 2 seeds)." in text
    assert "Missing: **E5M2** (1 of 2 seeds)." in text
    assert re.search(r"\*\*E5M2\*\* \+0\.05\d+ \(\+1\.\d+ %\) from 1 seed of 2", text)


def test_one_seed_is_measured_and_not_judged(answered) -> None:
    text = answered(seeds=(0,))
    assert "Measured, not judged" in text and "**One paired seed**" in text
    assert "noise floor**" not in text and "Higher loss" not in text


def test_five_seeds_allow_a_claim(answered) -> None:
    text = answered(["bf16", "E3M4", "E7M0"], seeds=range(5))
    assert re.search(r"Higher loss than the baseline: .*\*\*E7M0\*\*", text)
    assert "enough for a claim" in text


def test_without_the_baseline_no_cost_is_claimed(answered) -> None:
    text = answered(["E3M4", "E5M2"])
    assert "The baseline `bf16` is not in this grid" in text
    assert "E3M4 3." in text and "minus" not in text and "Higher" not in text


def test_a_baseline_that_diverged_leaves_the_others_unmeasured(answered) -> None:
    text = answered(["bf16", "E3M4"], diverged={"bf16-adamw-0-1": 40, "bf16-adamw-1-1": 40})
    assert "Diverged: **bf16** (2 of 2 seeds)." in text
    assert "no baseline cell with the same seed did: **E3M4**" in text


def test_an_empty_pipeline_has_an_honest_answer(answered) -> None:
    text = answered(["bf16", "E3M4"], seeds=(0,), missing=("bf16-adamw-0-1", "E3M4-adamw-0-1"))
    assert "2 missing" in text and "Missing: **bf16** (1 of 1 seed), **E3M4** (1 of 1 seed)." in text


def test_a_geometry_aware_arm_is_answered_for_with_its_leader(answered) -> None:
    arms = {"stiff_update": {"stiffness": "ulp"}}
    text = answered(["bf16", "E4M3", "E7M0"], ["adamw", "stiff_update"], range(5), arms=arms)
    assert "Open" not in text
    assert "**`stiff_update`** (geometry-aware) against `adamw`" in text
    assert "Lower loss: **E7M0**" in text and "**E7M0 gains most.**" in text
    assert "Whether the format has a part in it is open for E7M0" in text


def test_a_gain_with_a_virtual_twin_is_told_from_that_of_its_geometry() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    levels = {("E3M4", "stiff"): 3.2, ("virtual.E3M4", "stiff"): 3.2}
    runs = [(entry, arm) for entry in ("bf16", "E3M4", "virtual.E3M4", "E5M2") for arm in arms]
    random = np.random.default_rng(0)
    text = said(study_of({run: levels.get(run, 3.5) + 0.01 * random.standard_normal(5) for run in runs}, arms))
    line = next(line for line in text.splitlines() if line.startswith("The format's own part"))
    assert re.search(r"\*\*E3M4\*\* [+−]0\.0\d+ \(not told apart\)", line)
    assert "Whether the format has a part" not in text


def test_an_arm_without_a_plain_arm_of_its_base_is_left_open() -> None:
    arms = {"adamw": ADAMW, "stiff_sgd": {"base": "sgd", "stiffness": "ulp"}}
    text = said(study_of({(entry, arm): [3.0, 3.1] for entry in ("bf16", "E3M4") for arm in arms}, arms))
    assert "no plain `sgd` arm with `weights: master` to measure `stiff_sgd` against" in text


def test_the_control_is_reported_when_it_holds_and_shouted_when_it_fails(study, tmp_path) -> None:
    assert "The control holds" in said(study)
    write_project(tmp_path, ["E0M7", "E1M6"], diverged={"E0M7-adamw-0-1": 40}, **SMALL)
    assert "**The control fails**" in said(read(tmp_path))
