"""Laws of a report on several models. Oracles: reports on one model, a law whose parameters are here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from altgrad.reporting import model_sizes
from altgrad.reporting.compare import compare
from altgrad.reporting.cost_law import (
    Cost,
    Sizes,
    effective,
    fit,
    fit_cost,
    forms,
    left_out_error,
    left_out_errors,
    mean,
    resampled,
)
from altgrad.reporting.cost_law_section import cost_figure, described
from altgrad.reporting.figures import drawing
from altgrad.reporting.load import COLUMNS, IDENTITY, PrimaryMetric, joined, load_studies
from altgrad.reporting.markdown import to_markdown
from altgrad.reporting.report import write_report
from tests.reporting.synthetic_project import SMALL, add_model, write_project
from tests.reporting.test_figures import outside

E, A, ALPHA, B, BETA = 1.7, 40.0, 0.34, 60.0, 0.31
PARAMETERS = np.array([4e4, 4e4, 1.7e5, 1.7e5, 6e5, 6e5, 1.3e6])
TOKENS = PARAMETERS * np.array([1, 20, 5, 20, 1, 20, 5])
SHARES = {"E4M3": 0.97, "E5M2": 0.8}
SEEDS = 5


def loss(parameters: Any, tokens: Any, share: float = 1.0) -> Any:
    return E + A / (share * parameters) ** ALPHA + B / tokens**BETA


def sizes(noise: float = 0.0, models: int = len(PARAMETERS)) -> Sizes:
    """Return measurements of the law with the shares `SHARES`, and normal noise of both."""
    chance, n, d = np.random.default_rng(3), PARAMETERS[:models], TOKENS[:models]
    costs = {
        entry: (loss(n, d, share) - loss(n, d))[:, None] + chance.normal(0, noise / 3, (models, SEEDS))
        for entry, share in SHARES.items()
    }
    losses = loss(n, d)[:, None] + chance.normal(0, noise, (models, SEEDS))
    return Sizes([f"m{i}" for i in range(models)], n, d, losses, costs)


def project(root: Path, models: dict[str, tuple[int, int]], seeds: tuple[int, ...] = (0, 1, 2)) -> Path:
    """Write a project of these models beside gpt-nano: parameters and tokens by name, losses of the law."""
    write_project(root, ["bf16", "E4M3", "E5M2"], ["adamw", "spacing_unmatched"], seeds, **SMALL)
    for name, (parameters, tokens) in models.items():
        add_model(root, name, parameters, tokens, lambda cell, n=parameters, d=tokens: loss(
            n, d, SHARES.get(cell["format"], 1.0)) + 0.01 * cell["seed"] + 0.001 * (cell["seed"] * n % 7))  # fmt: skip
    return root / "data"


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    return project(tmp_path_factory.mktemp("two"), {"tiny": (40_000, 800_000), "gpt-50m": (170_000, 900_000)})


# --- comparisons ---------------------------------------------------------------------------------


def test_a_model_is_compared_as_in_a_grid_of_this_model_alone(two, tmp_path):
    alone = load_studies(project(tmp_path, {}))[""]
    studies = load_studies(two)
    assert list(studies) == ["gpt-nano", "tiny", "gpt-50m"]
    first = studies["gpt-nano"]
    assert compare(first).claims == compare(alone).claims
    for name, study in studies.items():
        assert list(study.cells.index) == [key + f"-{name}" * (study is not first) for key in alone.cells.index]


def test_results_have_each_models_own_differences_and_none_between_models(two, tmp_path):
    write_report(two, tmp_path, None)
    rows = pd.read_csv(tmp_path / "results.csv")
    studies = load_studies(two)
    assert list(rows["model"].unique()) == list(studies)
    for name, study in studies.items():
        cells = study.cells[study.cells["optimizer"] == "adamw"]
        cells = cells.pivot(index="seed", columns="format", values="val_loss")
        costs = rows[(rows["model"] == name) & (rows["comparison"] == "cost")].set_index("format")["delta"]
        for entry in ("E4M3", "E5M2"):
            assert costs[entry] == pytest.approx((cells[entry] - cells["bf16"]).mean(), abs=1e-6)


def test_all_runs_together_have_the_rows_of_each_model_and_an_identity_each(two):
    studies = load_studies(two)
    whole = joined(studies)
    assert not whole.cells[IDENTITY].duplicated().any()
    arms = ("adamw", "spacing_unmatched")
    assert whole.optimizers == [f"{arm}{end}" for end in ("", " (tiny)", " (gpt-50m)") for arm in arms]
    for name in ("cells", *COLUMNS):
        assert len(getattr(whole, name)) == sum(len(getattr(study, name)) for study in studies.values())


def test_a_report_of_several_models_is_whole_and_names_them(two, tmp_path):
    write_report(two, tmp_path, None)
    text = (tmp_path / "REPORT.md").read_text()
    assert "Sections that name no model are about `gpt-nano`. One section each is about `tiny` and `gpt-50m`." in text
    assert [line for line in text.splitlines() if line.startswith("## Model")] == ["## Model tiny", "## Model gpt-50m"]
    assert "completed are 3 models with 3, 3 and 3." in text and "effective parameters, %" not in text
    assert "figures/cost_by_model.png" in text and (tmp_path / "figures/cost_by_model.svg").exists()
    plots = pd.read_csv(tmp_path / "plots/validation.csv")
    assert {"adamw", "adamw (tiny)", "adamw (gpt-50m)"} <= set(plots["optimizer"])
    based = plots[plots["format"] == "bf16"]["delta_to_baseline"]
    assert len(based) and (based == 0).all(), "each model's baseline is its own"
    for file, place in (("metrics.json", ()), ("summary.json", ("models",))):
        found = json.loads((tmp_path / file).read_text())
        for name in place:
            found = found[name]
        assert {"tiny", "gpt-50m"} <= set(found)
    assert "E4M3-adamw-0-1-gpt-50m" in (tmp_path / "cells.html").read_text()


def test_a_grid_of_one_model_has_no_word_of_several(tmp_path):
    write_report(project(tmp_path, {}), tmp_path / "out", None)
    text = (tmp_path / "out/REPORT.md").read_text()
    assert "Several models" not in text and "## Model" not in text and "cost_by_model" not in text
    assert "model" not in pd.read_csv(tmp_path / "out/results.csv")


# --- the law -------------------------------------------------------------------------------------


def test_the_law_and_the_shares_are_those_that_made_the_losses():
    made = sizes()
    law = fit(made, mean(made.losses))
    assert law is not None and law.residual < 1e-3
    assert (law.least, law.a, law.b) == pytest.approx((E, ALPHA, BETA), abs=0.01)
    for entry, (share, low, high) in effective(made, law, resampled(made, law)).items():
        assert share == pytest.approx(SHARES[entry], abs=1e-3) and low == pytest.approx(high) == pytest.approx(share)


def test_an_interval_has_the_share_and_noise_widens_it():
    widths = []
    for noise in (0.002, 0.02):
        made = sizes(noise)
        law = fit(made, mean(made.losses))
        found = effective(made, law, resampled(made, law))
        for entry, (share, low, high) in found.items():
            assert low < share < high and low - (high - low) < SHARES[entry] < high + (high - low)
        widths.append(found["E5M2"][2] - found["E5M2"][1])
    assert widths[1] > 3 * widths[0]


def test_few_seeds_have_no_interval():
    made = sizes(0.002)
    of_two = made._replace(losses=made.losses[:, :2], costs={name: cost[:, :2] for name, cost in made.costs.items()})
    law = fit(of_two, mean(of_two.losses))
    shares = effective(of_two, law, resampled(of_two, law)).values()
    assert all(share > 0 and math.isnan(low) and math.isnan(high) for share, low, high in shares)


#: By form, the exponents of costs of that form alone, and the largest error of what is fitted.
MADE = {
    "constant": (0, 0), "effective parameters": (ALPHA, 0), "law's exponents": (ALPHA, BETA),
    "tokens per parameter": (0.6, 0.6), "any exponents": (0.2, 0.9),
}  # fmt: skip


@pytest.mark.parametrize("form", MADE)
def test_the_form_that_made_the_costs_predicts_a_left_out_size(form):
    """Narrower forms cannot; wider ones can, and with noise they predict worse."""
    law, made = fit(sizes(), mean(sizes().losses)), sizes()
    d, e = MADE[form]
    true = 0.02 * (TOKENS / 1e6) ** e / (PARAMETERS / 1e6) ** d
    noise = np.random.default_rng(5).normal(0, 3e-4, (2, len(PARAMETERS), SEEDS))
    costs = dict(zip(SHARES, true[:, None] * [[[1]], [[3]]] + noise, strict=True))
    made = made._replace(costs=costs)
    errors = left_out_errors(made, law)
    narrower = list(MADE)[: list(MADE).index(form)]
    assert all(errors[form]["E4M3"] < errors[other]["E4M3"] for other in narrower)
    assert next(iter(errors)) == form
    fitted = fit_cost(made, mean(costs["E5M2"]), forms(law)[form])
    assert fitted == pytest.approx((0.06, *MADE[form]), abs=0.03)
    assert fitted.at(5e6, 2e7) == pytest.approx(0.06 * 20**e / 5**d, rel=0.1)


def test_a_size_that_is_left_out_is_predicted_from_the_others_alone():
    """By hand: a constant is the mean of the other sizes' costs."""
    made, law = sizes(), fit(sizes(), mean(sizes().losses))
    costs = np.array([0.01, 0.03, 0.02, 0.02, 0.05, 0.01, 0.09])
    errors = [cost - costs[size != PARAMETERS].mean() for cost, size in zip(costs, PARAMETERS, strict=True)]
    found = left_out_error(made, costs, forms(law)["constant"])
    assert found == pytest.approx(math.sqrt(sum(error**2 for error in errors) / len(errors)))


def test_the_cost_of_effective_parameters_is_that_of_a_smaller_model():
    law, made = fit(sizes(), mean(sizes().losses)), sizes()
    fitted = fit_cost(made, mean(made.costs["E5M2"]), forms(law)["effective parameters"])
    smaller = loss(SHARES["E5M2"] * PARAMETERS, TOKENS) - loss(PARAMETERS, TOKENS)
    assert fitted.at(PARAMETERS, TOKENS) == pytest.approx(smaller, rel=1e-2)


def test_a_cost_that_is_missing_is_left_out():
    made, law = sizes(), fit(sizes(), mean(sizes().losses))
    costs = np.where(np.arange(len(PARAMETERS)) == 2, np.nan, Cost(0.01, 0.5, 0.5).at(PARAMETERS, TOKENS))
    assert fit_cost(made, costs, forms(law)["tokens per parameter"]) == pytest.approx((0.01, 0.5, 0.5), abs=1e-6)


@pytest.mark.parametrize("useless", [np.nan, 0.0])
def test_a_format_without_costs_does_not_decide_the_form(useless):
    """It diverged in every model, or is the baseline to the bit: the others' form is chosen as without it."""
    law, made = fit(sizes(), mean(sizes().losses)), sizes()
    costs = {"E4M3": np.tile(0.02 * (TOKENS / 1e6 / (PARAMETERS / 1e6))[:, None] ** 0.6, SEEDS)}
    alone = list(left_out_errors(made._replace(costs=costs), law))
    assert alone[0] == "tokens per parameter"
    costs["E7M0"] = np.full((len(PARAMETERS), SEEDS), useless)
    assert list(left_out_errors(made._replace(costs=costs), law)) == alone
    fitted = fit_cost(made, mean(costs["E7M0"]), forms(law)[alone[0]])
    assert fitted.factor == 0 if useless == 0 else np.isnan(fitted).all()


def test_losses_that_do_not_fall_have_no_law():
    made = sizes()
    assert fit(made, -mean(made.losses)) is None


def test_without_a_law_of_the_loss_costs_have_their_form_and_effective_parameters_are_not_known(tmp_path):
    costs = {"E4M3": np.tile(0.02 * (TOKENS / PARAMETERS)[:, None] ** 0.6, SEEDS)}
    made = sizes()._replace(losses=-sizes().losses, costs=costs)
    text = to_markdown(described(made, PrimaryMetric(), "bf16", tmp_path, "f"))
    assert "no law E + A / N^a + B / D^b fits the loss of `bf16`" in text
    heads = next(row for row in text.splitlines() if row.startswith("| format |")).split("|")[2:-1]
    assert {head.strip() for head in heads} == {"constant", "tokens per parameter", "any exponents"}
    row = next(row for row in text.splitlines() if row.startswith("| **E4M3** | 0.02 "))
    assert row.endswith("| 0.60 (0.60 to 0.60) | 0.60 (0.60 to 0.60) |")


def test_a_format_that_completed_in_few_models_is_named_and_changes_no_fit(tmp_path):
    made = sizes(noise=1e-3)
    some = np.where(np.arange(len(PARAMETERS))[:, None] < 2, np.nan, made.costs["E5M2"])
    one = {"E4M3": made.costs["E4M3"]}
    texts = {
        name: to_markdown(described(made._replace(costs=costs), PrimaryMetric(), "bf16", tmp_path, name))
        for name, costs in (("both", one | {"E5M2": some}), ("one", one), ("few", {"E5M2": some}))
    }
    rows = {name: [row for row in text.splitlines() if row.startswith("| **")] for name, text in texts.items()}
    assert rows["both"] == rows["one"] and len(rows["one"]) == 3 and rows["few"] == []
    assert "Not fitted, since too few models completed: E5M2." in texts["both"] and "Not fitted" not in texts["one"]
    assert "No format completed in enough models for a law of its cost." in texts["few"]


@pytest.mark.parametrize(("made", "said"), [
    (sizes(models=5), "at least 6 models"), (sizes(), ""),
    (sizes()._replace(tokens=20 * PARAMETERS), "with 4, 4 and 1."),
])  # fmt: skip
def test_what_a_law_needs_is_said_and_nothing_else(made, said):
    assert said in made.lacks() and bool(said) == bool(made.lacks())


def test_a_grid_with_enough_sizes_has_the_table_and_the_figure_keeps_its_texts_inside(tmp_path):
    sized = {f"m{i}": (int(n), int(d)) for i, (n, d) in enumerate(zip(PARAMETERS, TOKENS, strict=True))}
    data = project(tmp_path, sized)
    for path in (data / "runs").glob("*-1"):  # the first model's losses are of the law too
        metrics = json.loads((path / "metrics.json").read_text())
        metrics["val_loss"] = loss(metrics["parameters"], metrics["tokens"], SHARES.get(metrics["format"], 1.0))
        (path / "metrics.json").write_text(json.dumps(metrics))
    write_report(data, tmp_path / "out", None)
    text = (tmp_path / "out/REPORT.md").read_text()
    rows = {row.split("|")[1].strip(" *"): row.split("|")[2:4] for row in text.splitlines() if row.count("|") == 4}
    for entry, share in SHARES.items():
        percent, ends = rows[entry]
        assert float(percent) == pytest.approx(100 * share, abs=0.5) and " to " in ends
    of_models = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in text.splitlines() if row.startswith("| m")}
    for i, (n, d) in enumerate(zip(PARAMETERS, TOKENS, strict=True)):
        *size, base, of_e4m3, of_e5m2 = (float(re.sub("\u202f", "", x).replace("−", "-")) for x in of_models[f"m{i}"])
        assert size == pytest.approx([n, d / 1e6, d / n], rel=5e-3) and base == pytest.approx(loss(n, d), abs=0.05)
        assert [of_e4m3, of_e5m2] == pytest.approx([loss(n, d, SHARES[x]) - loss(n, d) for x in SHARES], abs=1e-4)
    studies = load_studies(data)
    measured = model_sizes.sizes_of(studies, {name: compare(study) for name, study in studies.items()})
    assert list(measured.parameters) == sorted(measured.parameters) and len(measured.models) == 8
    law = fit(measured, mean(measured.losses))
    assert law is not None
    with drawing():
        first = studies["gpt-nano"]
        costs = {entry: fit_cost(measured, mean(c), forms(law)["constant"]) for entry, c in measured.costs.items()}
        assert outside(cost_figure(first.primary, measured, costs)) == []
