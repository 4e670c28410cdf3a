"""Which format suits which layer. Oracle: monitors in which that is written down, and Student's t by scipy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting.compare import compare
from altgrad.reporting.document import Bullets, Fold, Table
from altgrad.reporting.layer_fit import fits_of, layer_fit
from altgrad.reporting.load import IDENTITY, Study
from tests.reporting.made_losses import study_of

ADAMW = {"base": "adamw", "lr": 1e-3}
Levels = Mapping[tuple[str, str], Mapping[str, float]]  # dB by layer and role, and by format


def made(levels: Levels, grad: str = "E5M2", noise: float = 0.1, seeds: int = 5) -> Study:
    """Return a study whose tensors have these SQNR in the second half of each run, and the opposite before."""
    formats = list(dict.fromkeys(name for by_format in levels.values() for name in by_format))
    losses = {(name, "adamw"): [3.0 + 0.1 * seed for seed in range(seeds)] for name in formats}
    study = study_of(losses, {"adamw": ADAMW}, formats[0])
    for key, cell in study.cells.iterrows():
        tensors = {role: {"format": cell["format"]} for role in ("weight", "input")}
        study.resolved[key]["rules"] = [
            tensors | {"layers": "*", "grad": {"format": grad or cell["format"]}},
            {"layers": "head", "weight": tensors["weight"], "input": None, "grad": None},
        ]
    random, rows = np.random.default_rng(0), []
    for _, cell in study.cells.iterrows():
        for (layer, role), by_format in levels.items():
            for step, sign in ((1, -1), (10, 1)):
                value = sign * by_format[cell["format"]] + noise * random.normal()
                rows.append([*cell[IDENTITY], step, layer, role, "sqnr_db", value])
    columns = [*IDENTITY, "step", "layer", "role", "metric", "value"]
    return replace(study, monitors=pd.DataFrame(rows, columns=columns))


LEVELS = {
    ("up", "weight"): {"E3M4": 30.0, "E4M3": 20.0, "E5M2": 10.0},
    ("down", "weight"): {"E3M4": 30.0, "E4M3": 29.0, "E5M2": 10.0},
    ("up", "input"): {"E3M4": 25.0, "E4M3": 24.0, "E5M2": 10.0},
    ("down", "input"): {"E3M4": 15.0, "E4M3": 24.0, "E5M2": 10.0},
    ("up", "grad"): {"E3M4": 15.0, "E4M3": 24.0, "E5M2": 10.0},
}


def test_the_best_format_of_each_tensor_is_named_with_its_lead():
    study = made(LEVELS)
    found = {(fit.layer, fit.role): fit for fit in fits_of(study, compare(study))}
    assert {place: (fit.best, fit.following) for place, fit in found.items()} == {
        ("up", "weight"): ("E3M4", "E4M3"), ("down", "weight"): ("E3M4", "E4M3"),
        ("up", "input"): ("E3M4", "E4M3"), ("down", "input"): ("E4M3", "E3M4"),
    }  # fmt: skip
    assert found["up", "weight"].sqnr_db == pytest.approx(30, abs=0.2) and found["up", "weight"].told_apart
    said = next(block for block in layer_fit(study, compare(study)) if isinstance(block, Bullets)).items
    assert said == [
        "**Weights**: highest in E3M4 in all 2 layers; no layer calls for another.",
        "**Inputs**: highest in E3M4 in 1 of 2 layers; in E4M3 in `down`.",
    ]


def test_leads_have_the_interval_of_their_seeds():
    study = made(LEVELS, noise=1.0)
    blocks = layer_fit(study, compare(study))
    table = next(block for block in blocks if isinstance(block, Table))
    fit = fits_of(study, compare(study))[0]
    low, high = stats.t.interval(0.95, 4, fit.lead_db.mean(), stats.sem(fit.lead_db))
    assert table.rows[0][-1] == f"+{fit.lead_db.mean():.1f} [+{low:.1f}, +{high:.1f}]"
    assert "over 5 seeds" in table.note


def test_a_lead_within_the_seeds_spread_is_said():
    study = made({("up", "weight"): {"E3M4": 20.0, "E4M3": 20.0}, ("down", "weight"): {"E3M4": 30.0, "E4M3": 20.0}})
    said = next(block for block in layer_fit(study, compare(study)) if isinstance(block, Bullets)).items
    assert said[0].endswith("In 1 of 2 the next is told apart by the seeds.")


def test_what_all_formats_quantize_alike_is_left_out_and_what_differs_is_not():
    study = made(LEVELS, grad="")
    assert ("up", "grad") in {(fit.layer, fit.role) for fit in fits_of(study, compare(study))}


def test_one_format_has_nothing_to_choose_and_one_seed_no_interval():
    one = made({("up", "weight"): {"E3M4": 30.0}})
    assert layer_fit(one, compare(one)) == []
    single = made(LEVELS, seeds=1)
    table = next(block for block in layer_fit(single, compare(single)) if isinstance(block, Table))
    assert "[" not in table.rows[0][-1] and table.rows[0][-1].startswith("+")


def test_formats_are_ranked_over_the_seeds_that_all_have_and_of_completed_runs():
    """E3M4 is half a decibel above E4M3 on every seed; E4M3 lost the one that is hard for all."""
    study = made({("up", "weight"): {"E3M4": 30.5, "E4M3": 30.0}}, noise=0.0)
    hard = (study.monitors["seed"] == 0) & (study.monitors["step"] == 10)
    study.monitors.loc[hard, "value"] -= 6.0
    study.cells.loc[(study.cells["format"] == "E4M3") & (study.cells["seed"] == 0), "status"] = "diverged"
    (fit,) = fits_of(study, compare(study))
    assert (fit.best, fit.following, len(fit.lead_db)) == ("E3M4", "E4M3", 4)
    assert fit.lead_db == pytest.approx([0.5] * 4)
    table = next(block for block in layer_fit(study, compare(study)) if isinstance(block, Table))
    assert "over 4 seeds" in table.note


def test_many_tensors_fold():
    study = made({(f"layer{i}", "weight"): {"E3M4": 30.0, "E4M3": 20.0} for i in range(13)})
    fold = next(block for block in layer_fit(study, compare(study)) if isinstance(block, Fold))
    assert fold.summary == "All 13 tensors"
