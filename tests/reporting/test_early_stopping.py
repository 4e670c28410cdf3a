"""What early stopping would have cost. Oracle: histories and final losses in which it is written down."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd

from altgrad.reporting.early_stopping import early_stopping, judgements
from altgrad.reporting.load import IDENTITY, Study
from tests.reporting.made_losses import study_of

ADAMW = {"base": "adamw", "lr": 1e-3}


def made(cells: dict[float, tuple[float, float | None]], seeds: int = 2) -> Study:
    """Return a study of one arm whose rates have these early and final losses, ``None`` for a run that diverged."""
    losses = {("E4M3", "adamw", rate): [final] * seeds for rate, (_, final) in cells.items()}
    study = study_of(losses, {"adamw": ADAMW}, "E4M3")
    study.cells["planned_steps"] = 100
    rows = [
        [*cell[IDENTITY], step, cells[cell["lr_scale"]][0], 0.0]
        for _, cell in study.cells.iterrows()
        for step in range(10, 101, 5)
    ]
    return replace(study, history=pd.DataFrame(rows, columns=[*IDENTITY, "step", "train_loss", "val_loss"]))


def test_what_would_be_stopped_and_what_of_it_ends_best_is_counted():
    study = made({1: (3.0, 2.0), 2: (3.1, 1.9), 4: (4.0, 2.5), 8: (5.0, None)})
    found = judgements(study).set_index("lr_scale")
    assert found["beaten"].groupby(level=0).all().to_dict() == {1: False, 2: False, 4: True, 8: True}
    assert found["best"].groupby(level=0).all().to_dict() == {1: False, 2: True, 4: False, 8: False}
    (block,) = early_stopping(study)
    assert "Of the 8 cells here" in block.text and "that is 4, 40 % of their steps" in block.text
    assert "0 of 2 [0 %, 66 %] would have been stopped" in block.text


def test_a_winner_that_would_have_been_stopped_is_told():
    (block,) = early_stopping(made({1: (3.0, 2.0), 2: (4.0, 1.9)}))
    assert "2 of 2 [34 %, 100 %] would have been stopped" in block.text


def test_one_rate_has_no_rival():
    assert early_stopping(made({1: (3.0, 2.0)})) == []


def test_a_rate_that_has_no_rival_is_not_judged():
    study = made({1: (3.0, 2.0), 2: (4.0, 1.9)})
    history = study.history[~((study.history["seed"] == study.seeds[0]) & (study.history["lr_scale"] == 2))]
    assert set(judgements(replace(study, history=history))["seed"]) == {study.seeds[1]}
    assert not math.isnan(judgements(study)["early"].sum())
