"""What a run does to its weights while it diverges is in no mean over runs. Oracle: the study without that run."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from altgrad.reporting.compare import compare
from altgrad.reporting.figures.updates import by_binade, recorded, updates_table
from altgrad.reporting.load import IDENTITY

LOST = "E4M3-stiff_update-1-1"
ARMS = {"stiff_update": {"stiffness": "ulp"}}


@pytest.mark.parametrize("size", [1e6, np.inf])
def test_the_updates_of_a_run_that_diverged_are_left_out(made, size: float) -> None:
    study = made(["bf16", "E4M3"], ["adamw", "stiff_update"], (0, 1, 2), arms=ARMS, diverged={LOST: 50})
    rows = study.monitors
    lost = (rows[IDENTITY] == study.cells.loc[LOST, IDENTITY].tolist()).all(axis=1)
    rows.loc[lost & rows["metric"].str.startswith("rungs"), "value"] = size
    comparison = compare(study)
    table = updates_table(study, comparison)
    assert [row[1] for row in table.rows] == ["1.00 / 1.5 / 80", "0.70 / 1.5 / 80"]
    assert table.note.endswith("Runs that diverged are left out.")
    binades = by_binade(recorded(study, comparison))
    study.monitors.drop(index=rows.index[lost], inplace=True)
    pd.testing.assert_frame_equal(binades, by_binade(recorded(study, comparison)))


def test_an_arm_that_completed_no_run_has_no_updates_to_show(made) -> None:
    diverged = {f"E4M3-stiff_update-{seed}-1": 50 for seed in (0, 1)}
    study = made(["bf16", "E4M3", "E3M4"], ["adamw", "stiff_update"], arms=ARMS, diverged=diverged)
    (_, stiff) = updates_table(study, compare(study)).rows
    assert stiff == ["**stiff_update**", "–", "0.70 / 1.5 / 80"]


def test_nothing_is_said_of_runs_that_are_not_there(made) -> None:
    study = made(["bf16", "E4M3"])
    assert "diverged" not in updates_table(study, compare(study)).note
