"""Tables of what happened inside runs. Oracles: the study without the run that diverged; scipy's relative entropy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting.compare import compare
from altgrad.reporting.figures.updates import by_binade, recorded, updates_table
from altgrad.reporting.load import IDENTITY
from altgrad.reporting.tables_inside import diagnosis_table, divergences

LOST = "E4M3-spacing_unmatched-1-1"
ARMS = {"spacing_unmatched": {"stiffness": "ulp"}}


@pytest.mark.parametrize("size", [1e6, np.inf])
def test_the_updates_of_a_run_that_diverged_are_left_out(made, size: float) -> None:
    study = made(["bf16", "E4M3"], ["adamw", "spacing_unmatched"], (0, 1, 2), arms=ARMS, diverged={LOST: 50})
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
    diverged = {f"E4M3-spacing_unmatched-{seed}-1": 50 for seed in (0, 1)}
    study = made(["bf16", "E4M3", "E3M4"], ["adamw", "spacing_unmatched"], arms=ARMS, diverged=diverged)
    (_, stiff) = updates_table(study, compare(study)).rows
    assert stiff == ["**spacing_unmatched**", "–", "0.70 / 1.5 / 80"]


def test_nothing_is_said_of_runs_that_are_not_there(made) -> None:
    study = made(["bf16", "E4M3"])
    assert "diverged" not in updates_table(study, compare(study)).note


def test_divergence_is_scipys_relative_entropy_of_runs_of_one_seed_and_layer(study, comparison) -> None:
    rows = study.diagnosis[study.diagnosis["metric"] == "log2_magnitude"]

    def histogram(name: str, seed: int, layer: str) -> pd.Series:
        own = rows[(rows["format"] == name) & (rows["seed"] == seed) & (rows["layer"] == layer)]
        return own.set_index("x")["value"]

    def bits(p: pd.Series, q: pd.Series) -> float:
        p, q = p.align(q, fill_value=0.0)
        return stats.entropy(p, (1 - 1e-6) * q + 1e-6 * p, base=2)

    found = divergences(study, comparison)
    layers = rows["layer"].unique()
    for name, other in (("E4M3", lambda seed: seed), ("bf16", lambda seed: 1 - seed)):
        pairs = [(histogram(name, s, layer), histogram("bf16", other(s), layer)) for s in (0, 1) for layer in layers]
        assert found[name] == pytest.approx(np.mean([bits(*pair) for pair in pairs]))
    assert found["E0M7"] == found["E1M6"]
    table = diagnosis_table(study, comparison)
    place = [column.head for column in table.columns].index("E4M3")
    assert float(table.rows[-1][place]) == pytest.approx(found["E4M3"], abs=5e-5)


@pytest.mark.parametrize(("bins", "bits"), [((0.0, 0.0), 0.0), ((0.0, 1.0), np.log2(1e6))])
def test_the_divergence_of_equal_histograms_is_zero_and_of_disjoint_ones_finite(study, comparison, bins, bits) -> None:
    rows = study.diagnosis[(study.diagnosis["metric"] == "log2_magnitude")].drop_duplicates(["format", "seed", "layer"])
    rows = rows.assign(value=1.0, x=np.where(rows["format"] == "bf16", *bins))
    found = divergences(dataclasses.replace(study, diagnosis=rows), comparison)
    assert found["E4M3"] == pytest.approx(bits) and found["bf16"] == pytest.approx(0.0)
    without = dataclasses.replace(study, diagnosis=rows[rows["format"] != "bf16"])
    assert divergences(without, comparison).empty
