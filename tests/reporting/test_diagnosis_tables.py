"""Tables of what happened inside runs, and flags.

Oracles: the study without the run that diverged; scipy's relative entropy; values set by hand.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.metrics import METRICS, Limit, Metric
from altgrad.reporting.compare import compare
from altgrad.reporting.diagnosis_tables import diagnosis_table, divergences, flag_name, raised, updates_table
from altgrad.reporting.figures.layers import by_binade, recorded
from altgrad.reporting.load import IDENTITY
from tests.reporting.made_losses import texts

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
    assert [row[1] for row in texts(table)] == ["1.00 / 1.5 / 80", "0.70 / 1.5 / 80"]
    assert table.note.endswith("Runs that diverged are left out.")
    binades = by_binade(recorded(study, comparison))
    study.monitors.drop(index=rows.index[lost], inplace=True)
    pd.testing.assert_frame_equal(binades, by_binade(recorded(study, comparison)))
    study.cells["status"] = "completed"
    assert "diverged" not in updates_table(study, comparison).note


def test_an_arm_that_completed_no_run_has_no_updates_to_show(made) -> None:
    diverged = {f"E4M3-spacing_unmatched-{seed}-1": 50 for seed in (0, 1)}
    study = made(["bf16", "E4M3", "E3M4"], ["adamw", "spacing_unmatched"], arms=ARMS, diverged=diverged)
    _, stiff = texts(updates_table(study, compare(study)))
    assert stiff == ["**spacing_unmatched**", "–", "0.70 / 1.5 / 80"]


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
    assert float(texts(table)[-1][place]) == pytest.approx(found["E4M3"], abs=5e-5)


@pytest.mark.parametrize(("bins", "bits"), [((0.0, 0.0), 0.0), ((0.0, 1.0), np.log2(1e6))])
def test_the_divergence_of_equal_histograms_is_zero_and_of_disjoint_ones_finite(study, comparison, bins, bits) -> None:
    rows = study.diagnosis[(study.diagnosis["metric"] == "log2_magnitude")].drop_duplicates(["format", "seed", "layer"])
    rows = rows.assign(value=1.0, x=np.where(rows["format"] == "bf16", *bins))
    found = divergences(replace(study, diagnosis=rows), comparison)
    assert found["E4M3"] == pytest.approx(bits) and found["bf16"] == pytest.approx(0.0)
    without = replace(study, diagnosis=rows[rows["format"] != "bf16"])
    assert divergences(without, comparison).empty


# --- flags ----------------------------------------------------------------------------------------------

# Role and metric of what training recorded, and the last value that is fine.
WATCHED = [
    ("input", "overflow_frac", 0.01),
    ("grad", "underflow_frac", 0.1),
    ("output", "kurtosis", 10.0),
    ("output", "attention_low_heads", 1.0),
    *((role, "nonfinite", 0.0) for role in ("input", "weight", "grad")),
]
CELL = ("E4M3", "adamw", 0, 1.0)
BEYOND = 1 + 1e-9


def of_monitors(study, rows):
    """Return the study with these rows (step, layer, role, metric, value) of one cell as its monitors.

    Around them stand huge values of roles and metrics that are nobody's, first and last in the alphabet.
    """
    columns = [*IDENTITY, "step", "layer", "role", "metric", "value"]
    own = {(role, metric) for _, _, role, metric, _ in rows}
    others = [pair for role, metric in own for other in ("a", "zz") for pair in ((role, other), (other, metric))]
    rows = [*((1, "before", *pair, 1e9) for pair in others), *rows, *((1, "zz", *pair, 1e9) for pair in others)]
    return replace(study, monitors=pd.DataFrame([(*CELL, *row) for row in rows], columns=columns))


def named(found: pd.DataFrame, role: str, metric: str) -> list[tuple[str, float, float]]:
    own = found[found["what"] == flag_name(METRICS[metric], role)]
    return list(zip(own["layer"], own["value"], own["limit"], strict=True))


@pytest.mark.parametrize(("role", "metric", "level"), WATCHED)
def test_a_layer_is_flagged_when_any_pass_was_beyond_the_level(study, role, metric, level) -> None:
    beyond = level * BEYOND or 1.0
    steps = [(1, "a", role, metric, level), (1, "b", role, metric, beyond), (2, "b", role, metric, level)]
    found = raised(of_monitors(study, steps))
    assert named(found, role, metric) == [("b", beyond, level)]


def test_every_watched_metric_has_a_level_here() -> None:
    watched = {(role, row.name) for row in METRICS.values() for role in row.watched}
    assert watched == {(role, name) for role, name, _ in WATCHED}


def test_the_ends_of_the_network_are_held_against_each_other(study) -> None:
    for first, last, flagged in ((1.0, 100.0, 0), (100.0, 1.0, 0), (1.0, 100.0 * BEYOND, 1), (101.0, 1.0, 1)):
        rows = [(1, layer, "weight_grad", "l2", norm) for layer, norm in (("a", first), ("b", 1e6), ("c", last))]
        found = named(raised(of_monitors(study, rows)), "", "gradient_ratio")
        assert found == [("", max(first, last), 100.0)][:flagged]


@pytest.mark.parametrize(("share", "flagged"), [(0.5, False), (0.5 * BEYOND, True)])
def test_a_run_is_flagged_when_more_than_half_of_its_steps_are_clipped(study, share, flagged) -> None:
    found = raised(replace(study, cells=study.cells.assign(clipped_frac=share)))
    assert named(found, "", "clipped_frac") == ([("", share, 0.5)] * len(study.cells) if flagged else [])


def test_a_watched_limit_may_be_one_below_and_stricter_in_some_layers(study, monkeypatch) -> None:
    limit = Limit(above=False, value=1.0, strict=2.0)
    monkeypatch.setitem(METRICS, "kurtosis", replace(METRICS["kurtosis"], limit=limit))
    values = {"a": (0.9, 0.8), "b": (1.5, 1.5), "head": (1.5, 1.9)}
    rows = [(i, layer, "output", "kurtosis", v) for layer, pair in values.items() for i, v in enumerate(pair)]
    found = named(raised(of_monitors(study, rows)), "output", "kurtosis")
    assert found == [("a", 0.8, 1.0), ("head", 1.5, 2.0)]


def test_a_flag_of_a_diagnosis_is_named_by_its_metric_one_of_the_user_too(study) -> None:
    columns = [*IDENTITY, "layer", "metric", "value", "limit"]
    rows = pd.DataFrame([(*CELL, "a", name, 1.0, 2.0) for name in ("grad_snr_db", "mine")], columns=columns)
    own = Metric("mine", "ratio", "What it is.", offline="weight", limit=Limit(above=False, value=2.0))
    found = raised(replace(study, flags=rows, metrics={"mine": own}))
    told = found[found["limit"] == 2.0]["what"].tolist()
    assert told == ["grad_snr_db of weight gradient (dB)", "mine of weights (ratio)"]
