"""What a report says to run next. Oracle: the study with those seeds has an interval about half as wide."""

from __future__ import annotations

import re

import numpy as np
import pytest

from altgrad.reporting.claims import BEYOND
from altgrad.reporting.compare import compare
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


def test_the_seeds_that_are_named_halve_the_interval():
    study = study_of(losses(40), ARMS)
    comparison = compare(study)
    question, claim = widest(comparison)
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
    comparison = compare(study_of(losses(8, own=0.05, noise=1e-4), ARMS))
    assert not any(found[0] == BEYOND for found in filter(None, [widest(comparison)]))
    assert comparison.answers.of(BEYOND, "E4M3", "stiff").told_apart


def test_nothing_is_said_where_nothing_can_be(tmp_path):
    study = study_of({("bf16", "adamw"): [3.0, 3.1]}, {"adamw": ADAMW})
    assert next_seeds(study, compare(study)) == ""
