"""A figure stands in the report of a study that has findings for it; elsewhere it says why not. Oracle: made rows."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest

from altgrad.reporting.compare import compare
from altgrad.reporting.figures import FIGURES, draw_all, quiet
from altgrad.reporting.load import IDENTITY
from tests.reporting.made_losses import ADAMW, study_of

FINDINGS = {spec.name: spec.findings for spec in FIGURES if spec.findings}


def study_with(monitors: list[tuple] = (), diagnosis: list[tuple] = (), **arm):
    """Return a study of one quantized format; rows are (layer, role, step or x, metric, value), in every seed."""
    study = study_of({("bf16", "adamw"): [3.5, 3.6], ("E4M3", "adamw"): [3.5, 3.6]}, {"adamw": ADAMW | arm})
    identities = [("E4M3", "adamw", seed, 1) for seed in (0, 1)]
    columns = [*IDENTITY, "layer", "role", "step", "metric", "value"]
    rows = [[*who, *row] for who in identities for row in monitors]
    study.__dict__["monitors"] = pd.DataFrame(rows, columns=columns)
    rows = [[*who, 100, *row] for who in identities for row in diagnosis]
    columns = [*IDENTITY, "step", "layer", "role", "x", "metric", "value"]
    study.__dict__["diagnosis"] = pd.DataFrame(rows, columns=columns)
    return study


def told(name: str, study) -> bool:
    return FINDINGS[name].found(study, compare(study))


@pytest.mark.parametrize(("share", "findings"), [(0.09, False), (0.11, True)])
def test_a_limit_decides_for_what_has_one(share: float, findings: bool) -> None:
    rows = [("a", "grad", step, "underflow_frac", share) for step in (50, 100)]
    assert told("underflow", study_with(rows)) == findings
    assert "more than 10 %" in FINDINGS["underflow"].otherwise


def test_what_was_beyond_a_limit_early_alone_is_no_news() -> None:
    rows = [("a", "grad", 10, "underflow_frac", 0.5), ("a", "grad", 100, "underflow_frac", 0.01)]
    assert not told("underflow", study_with(rows))


@pytest.mark.parametrize(("value", "findings"), [(9.0, True), (11.0, False)])
def test_the_limit_of_a_diagnosis_counts_too(value: float, findings: bool) -> None:
    assert told("gradients", study_with(diagnosis=[("a", "weight_grad", None, "grad_snr_db", value)])) == findings


@pytest.mark.parametrize(("last", "findings"), [(26.0, False), (23.0, True), (37.0, True)])
def test_precision_that_moves_by_a_bit_is_a_finding(last: float, findings: bool) -> None:
    rows = [("a", "weight", 0, "sqnr_db", 30.0), ("a", "weight", 100, "sqnr_db", last)]
    assert told("health_over_time", study_with(rows)) == findings


@pytest.mark.parametrize(("least", "findings"), [(3.4, True), (3.5, False)])
def test_a_gradient_that_came_near_its_noise_at_any_snapshot_is_a_finding(least: float, findings: bool) -> None:
    study = study_with()
    rows = [["E4M3", "adamw", seed, 1, "gradient_to_noise", step, x]
            for seed in (0, 1) for step, x in ((0, least), (100, 9.0))]  # fmt: skip
    study.__dict__["course"] = pd.DataFrame(rows, columns=[*IDENTITY, "metric", "step", "value"])
    assert told("gradient_noise", study) == findings


def test_what_the_weights_do_to_the_values_is_a_finding_where_they_are_held_as_values() -> None:
    assert told("code_usage", study_with(weights="quantized")) and not told("code_usage", study_with())


def test_an_idle_bit_and_an_uneven_spread_are_news() -> None:
    assert told("bit_activity", study_with(diagnosis=[("a", "weight", 7, "bit_activity", 0.01)]))
    assert not told("bit_activity", study_with(diagnosis=[("a", "weight", 7, "bit_activity", 0.6)]))
    assert told("misalignment", study_with(diagnosis=[("a", "weight", None, "misalignment_mean", 0.2)]))
    assert not told("misalignment", study_with(diagnosis=[("a", "weight", None, "misalignment_mean", 0.252)]))


def test_the_report_draws_nothing_of_what_it_leaves_out(report, study, comparison, tmp_path) -> None:
    specs = quiet(study, comparison)
    silent = {spec.name for spec in specs}
    assert silent and silent < set(FINDINGS)
    assert not silent & set(draw_all(study, comparison, tmp_path / "figures", specs))
    text = (report / "REPORT.md").read_text()
    assert not any(f"figures/{name}.png" in text for name in silent)


def test_the_command_draws_what_is_left_out(project, tmp_path) -> None:
    def run(*names: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "altgrad.reporting.figures", *names, "--into", str(tmp_path)]
        return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)

    found = run("misalignment")
    assert found.returncode == 0 and (tmp_path / "misalignment.png").is_file(), found.stderr
    wrong = run("nothing")
    assert wrong.returncode == 1 and "no figure nothing; there are" in wrong.stderr and "Traceback" not in wrong.stderr
