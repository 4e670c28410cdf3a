"""The metrics of a study that lost runs are those that its report tells. Oracle: losses by hand."""

from __future__ import annotations

import numpy as np
import pytest

from altgrad.reporting.compare import compare
from altgrad.reporting.load import Study
from altgrad.reporting.metrics import metrics
from altgrad.reporting.summary import certainty, lowest
from altgrad.reporting.wording import significant
from tests.reporting.made_losses import ADAMW, STIFF, study_of


def numbers(study: Study) -> dict:
    return metrics(study, compare(study), 0)


def test_the_best_is_lowest_over_the_seeds_that_all_completed() -> None:
    """A lost the seed of high losses, and B ends lower wherever both have a loss."""
    losses = {
        ("bf16", "adamw"): [4.0, 2.0, 3.0], ("A", "adamw"): [None, 2.2, 3.2], ("B", "adamw"): [4.1, 2.1, None],
        ("C", "adamw"): [4.3, 2.3, 3.3],
    }  # fmt: skip
    study = study_of(losses, {"adamw": ADAMW})
    assert numbers(study)["best"] == {"format": "B", "optimizer": "adamw", "val_loss": pytest.approx(3.1)}
    assert lowest(study, compare(study))[0].run[0] == "B"


def test_the_best_is_something_that_is_quantized() -> None:
    losses = {("bf16", "adamw"): [3.0, 3.1], ("virtual.A", "adamw"): [3.0, 3.1], ("A", "adamw"): [3.2, 3.3]}
    assert numbers(study_of(losses, {"adamw": ADAMW}))["best"]["format"] == "A"


def test_there_is_no_best_where_nothing_quantized_completed() -> None:
    losses = {("bf16", "adamw"): [3.0, 3.1], ("A", "adamw"): [None, None]}
    nothing = {"format": None, "optimizer": None, "val_loss": None}
    assert numbers(study_of(losses, {"adamw": ADAMW}))["best"] == nothing


def test_the_noise_floor_is_that_of_the_report() -> None:
    """Five seeds, of which one arm lost two: three pairs."""
    rng = np.random.default_rng(0)
    losses = {
        (entry, arm): list(3 + 0.01 * rng.standard_normal(5)) for entry in ("bf16", "A") for arm in ("adamw", "stiff")
    }
    losses["A", "stiff"][1:3] = [None, None]
    study = study_of(losses, {"adamw": ADAMW, "stiff": STIFF})
    comparison = compare(study)
    floor = numbers(study)["noise_floor"]
    assert floor == pytest.approx(comparison.noise.floor(3))
    assert f"Equal runs differ by up to {significant(floor)} 19 times in 20." in certainty(study, comparison, None)
