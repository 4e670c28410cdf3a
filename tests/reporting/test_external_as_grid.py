"""Rows of a grid, given as a table of runs, have the numbers and figures of the grid's report.

Oracles: the committed report and the losses of its runs in cells.html; the comparison of a study in memory. The family
and the script are those of COMPARE.md.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from altgrad.reporting.compare import Comparison, compare
from altgrad.reporting.external import Family, read_curves, read_rows, study_of
from altgrad.reporting.figures import draw, report_figures
from tests.reporting.compared import report, rows_of, table
from tests.reporting.made_losses import ADAMW, STIFF
from tests.reporting.made_losses import study_of as made_study

REPORTS = Path(__file__).parents[2] / "reports"
PAGE = (REPORTS.parent / "altgrad/reporting/COMPARE.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the examples of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def committed() -> list[dict]:
    """Return the runs of the committed report."""
    page = (REPORTS / "cells.html").read_text(encoding="utf-8")
    return json.JSONDecoder().raw_decode(page[page.index('{"baseline"') :])[0]["cells"]


def test_the_first_screen_of_the_committed_report_has_the_same_numbers(tmp_path):
    family = tmp_path / "family.yaml"
    family.write_text(blocks("yaml")[0])
    runs = [(run["format"], run["optimizer"], run["seed"], run["results"]["val_loss"]) for run in committed()]
    theirs = report(table(tmp_path / "results.csv", runs), "--family", family)
    ours = (REPORTS / "REPORT.md").read_text(encoding="utf-8")
    for own, lead in (("What each format costs", "What each configuration changes"),
                      ("What `spacing_scaled` changes", "What `spacing_scaled` changes"),
                      ("Lowest loss", "Lowest loss")):  # fmt: skip
        assert rows_of(theirs, f"**{lead}**") == rows_of(ours, f"**{own}**"), own
    certain = next(line for line in theirs.splitlines() if line.startswith("Paired seeds"))
    for sentence in certain.split(". "):
        assert sentence in ours


def test_the_script_of_the_page_writes_the_columns_that_the_command_reads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[0], {})
    final = read_rows(Path("results.csv"), "loss")
    later = read_curves(Path("curves.csv"), "loss", final)
    assert final.to_dict("records") == [{"configuration": "fp8", "optimizer": "muon", "seed": 0, "loss": 3.276}]
    assert later.to_dict("records") == [final.iloc[0].to_dict() | {"step": 100, "loss": 4.18}]


def losses(seed: int = 3) -> dict[tuple[str, str], list[float | None]]:
    """Return the losses of six seeds; one run has diverged."""
    random = np.random.default_rng(seed)
    effects = {("E4M3", "stiff"): -0.03, ("E3M4", "stiff"): -0.01, ("E4M3", "adamw"): 0.02}
    entries, arms = ("bf16", "E4M3", "E3M4", "virtual.E4M3"), ("adamw", "stiff", "shuffled")
    found = {
        run: list(3.5 + effects.get(run, 0.0) + 0.004 * random.standard_normal(6))
        for run in itertools.product(entries, arms)
    }
    found["E3M4", "stiff"][2] = None
    return found


def numbers(comparison: Comparison) -> dict[tuple, list]:
    return {
        question: [*(getattr(result, field.name) for field in fields(result)[1:]), *vars(result.difference).values()]
        for question, result in comparison.claims.items()
    }


def test_every_question_of_a_grid_has_the_same_answer_and_every_figure_the_same_bytes(tmp_path):
    made = losses()
    grid = made_study(made, {"adamw": ADAMW, "stiff": STIFF, "shuffled": STIFF | {"stiffness": "permuted"}})
    rows = [(*run, seed, "diverged" if loss is None else loss)
            for run, of_run in made.items() for seed, loss in enumerate(of_run)]  # fmt: skip
    read = read_rows(table(tmp_path / "results.csv", rows), "loss")
    family = Family(
        reference="bf16", reference_optimizer="adamw", optimizer_controls={"shuffled": "stiff"},
        configuration_controls={"virtual.E4M3": "E4M3"}, unquantized=["bf16"], unit="nats per token",
    )  # fmt: skip
    given = study_of(read, None, family.checked(read, "results.csv"))
    ours, theirs = compare(grid), compare(given)
    assert theirs.claims.keys() == ours.claims.keys() and len(ours.claims) > 10
    for question, expected in numbers(ours).items():
        assert numbers(theirs)[question] == pytest.approx(expected, nan_ok=True), question
    for folder, study, comparison in (("grid", grid, ours), ("given", given, theirs)):
        draw([spec for spec in report_figures() if spec.name == "gains"], study, comparison, tmp_path / folder)
    assert (tmp_path / "grid/gains.png").read_bytes() == (tmp_path / "given/gains.png").read_bytes()
