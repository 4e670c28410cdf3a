"""What an arm gains over the run. Oracles: losses made of a gain that is known at each step; scipy's interval."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting.compare import compare
from altgrad.reporting.figures import FIGURES
from altgrad.reporting.figures.gains import courses
from altgrad.reporting.figures.style import drawing
from altgrad.reporting.load import IDENTITY, Study
from tests.reporting.made_losses import ADAMW, STIFF, study_of

STEPS = (0, 10, 20, 40, 80)
NOISE = (0.0, 0.01, -0.01)  # what an arm gains more with each seed


def rises_and_falls(step: int) -> float:
    return 0.1 if step == 20 else -0.2 if step == 80 else 0.0


def made(lost: tuple[str, str, int] | None = None, seeds: int = 3) -> Study:
    """An arm that gains as `rises_and_falls` says in E3M4, and nothing in bf16, at the first of two rates.

    ``lost`` is a cell that diverged after a loss of 99.
    """
    losses = {
        (entry, arm, rate): [None if (entry, arm, seed) == lost else 3 + rate for seed in range(seeds)]
        for entry, arm, rate in itertools.product(("bf16", "E3M4"), ("adamw", "stiff"), (1, 2))
    }
    study = study_of(losses, {"adamw": ADAMW, "stiff": STIFF})
    rows = []
    for (entry, arm, rate), seed, step in itertools.product(losses, range(seeds), STEPS):
        gain = (rises_and_falls(step) + NOISE[seed]) * ((entry, arm) == ("E3M4", "stiff"))
        loss = 99.0 if (entry, arm, seed) == lost else 5 - 0.01 * step + 0.3 * seed + rate - gain
        rows += [(entry, arm, seed, rate, step, np.nan, loss), (entry, arm, seed, rate, step + 5, 1.0, np.nan)]
    columns = [*IDENTITY, "step", "train_loss", "val_loss"]
    return replace(study, history=pd.DataFrame(rows, columns=columns))


def test_a_gain_is_held_against_the_same_seed_after_the_same_step():
    study = made()
    found = courses(study, compare(study))
    assert list(found) == [("bf16", "stiff"), ("E3M4", "stiff")]
    for (entry, _), own in found.items():
        assert list(own.index) == [10, 20, 40, 80], "before training nothing is gained"
        for step, row in own.iterrows():
            known = [-rises_and_falls(step) - noise if entry == "E3M4" else 0.0 for noise in NOISE]
            assert row.to_numpy() == pytest.approx(known, abs=1e-12)


def test_a_run_that_diverged_takes_part_in_no_gain():
    study = made(("E3M4", "adamw", 1))
    own = courses(study, compare(study))["E3M4", "stiff"]
    assert own[1].isna().all() and own[[0, 2]].notna().all(axis=None)


def test_there_is_no_figure_without_an_arm_that_could_gain():
    study = study_of({("bf16", "adamw"): [3.0, 3.1], ("E3M4", "adamw"): [3.0, 3.1]}, {"adamw": ADAMW})
    (spec,) = [spec for spec in FIGURES if spec.name == "gains_over_run"]
    assert spec.draw(study, compare(study)) is None


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_figure_draws_the_mean_of_the_seeds_and_its_interval(seeds):
    study = made(seeds=seeds)
    (spec,) = [spec for spec in FIGURES if spec.name == "gains_over_run"]
    with drawing():
        figure = spec.draw(study, compare(study))
    bf16, axis = figure.axes
    assert [panel.get_title(loc="left") for panel in (bf16, axis)] == ["bf16", "E3M4"]
    drawn = [line.get_ydata() for line in axis.lines]
    means = [-rises_and_falls(step) - np.mean(NOISE[:seeds]) for step in STEPS[1:]]
    assert any(len(line) == len(means) and line == pytest.approx(means) for line in drawn)
    known = stats.t.interval(0.95, 2, means[-1], 0.01 / np.sqrt(3)) if seeds > 1 else ()
    ends = {y for band in axis.collections for path in band.get_paths() for x, y in path.vertices if x == STEPS[-1]}
    assert all(any(y == pytest.approx(end) for y in ends) for end in known)


def test_an_interval_that_is_wide_early_in_the_run_hides_no_line():
    study = made()
    wild = (study.history["step"] == 10) & (study.history["optimizer"] == "stiff") & (study.history["format"] == "bf16")
    shift = study.history["seed"].map({0: 50.0, 1: -50.0, 2: 0.0})
    history = study.history.assign(val_loss=study.history["val_loss"] + shift * wild)
    study = replace(study, history=history)
    (spec,) = [spec for spec in FIGURES if spec.name == "gains_over_run"]
    with drawing():
        figure = spec.draw(study, compare(study))
    assert max(end for path in figure.axes[0].collections[0].get_paths() for _, end in path.vertices) > 50
    means = [-rises_and_falls(step) - np.mean(NOISE) for step in STEPS[1:]]
    for axis in figure.axes:
        low, high = axis.get_ylim()
        assert -1 < low < min(means) and max(means) < high < 1
