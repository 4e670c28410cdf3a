"""What is flagged, and that figures and flags speak of the same limits. Oracle: values set by hand."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from altgrad.metrics import METRICS, Limit, Metric
from altgrad.reporting.flags import named as words
from altgrad.reporting.flags import raised
from altgrad.reporting.load import IDENTITY

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
    own = found[found["what"] == words(METRICS[metric], role)]
    return list(zip(own["layer"], own["value"], own["limit"], strict=True))


def with_limit(monkeypatch: pytest.MonkeyPatch, name: str, value: float, strict: float | None = None) -> None:
    limit = Limit(METRICS[name].limit.above, value, strict)
    monkeypatch.setitem(METRICS, name, replace(METRICS[name], limit=limit))


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


def test_a_changed_limit_changes_the_flags(study, monkeypatch) -> None:
    rows = [(1, "a", "output", "kurtosis", 4.0)]
    assert named(raised(of_monitors(study, rows)), "output", "kurtosis") == []
    with_limit(monkeypatch, "kurtosis", 3.0)
    assert named(raised(of_monitors(study, rows)), "output", "kurtosis") == [("a", 4.0, 3.0)]


def test_a_flag_of_a_diagnosis_is_named_by_its_metric_one_of_the_user_too(study) -> None:
    columns = [*IDENTITY, "layer", "metric", "value", "limit"]
    rows = pd.DataFrame([(*CELL, "a", name, 1.0, 2.0) for name in ("grad_snr_db", "mine")], columns=columns)
    own = Metric("mine", "ratio", "What it is.", offline="weight", limit=Limit(above=False, value=2.0))
    found = raised(replace(study, flags=rows, metrics={"mine": own}))
    told = found[found["limit"] == 2.0]["what"].tolist()
    assert told == ["grad_snr_db of weight gradient (dB)", "mine of weights (ratio)"]
