"""The comparison recovers what was put in. Oracle: each run's metrics.json and arithmetic by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from altgrad.reporting import compare as c
from altgrad.reporting.compare import compare, is_null, is_plain, judge
from altgrad.reporting.control import check_twins
from altgrad.reporting.explain import correlations, explanation
from altgrad.reporting.fairness import conditions
from altgrad.reporting.flags import raised
from altgrad.reporting.statistics import Difference, Noise

NOISE = Noise(sd=0.01, dof=1000, arms=4, seeds=5)  # floor(n) = 0.0196 * sqrt(2 / n)


def loss(project: Path, key: str) -> float:
    return json.loads((project / f"data/runs/{key}/metrics.json").read_text())["val_loss"]


def row(frame, **values):
    for name, value in values.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_difference_to_the_baseline_is_the_mean_over_shared_seeds(project: Path, comparison) -> None:
    differences = [loss(project, f"E4M3-adamw-{seed}-1") - loss(project, f"bf16-adamw-{seed}-1") for seed in (0, 1)]
    found = row(comparison.results, format="E4M3")
    assert found["difference"].mean == pytest.approx(sum(differences) / 2, rel=1e-12)
    assert found["difference"].n == 2


def test_a_diverged_or_missing_run_is_counted_and_never_averaged(project: Path, comparison) -> None:
    diverged, missing = row(comparison.results, format="E7M0"), row(comparison.results, format="E5M2")
    assert (diverged["completed"], diverged["diverged"], diverged["difference"].n) == (1, 1, 1)
    assert (missing["completed"], missing["missing"]) == (1, 1)
    assert diverged["val_loss"] == loss(project, "E7M0-adamw-0-1")


def test_gap_and_perplexity_follow_from_the_losses(project: Path, comparison) -> None:
    own, base = loss(project, "E5M2-adamw-0-1"), loss(project, "bf16-adamw-0-1")
    found = row(comparison.results, format="E5M2")
    assert found["val_gap"] == pytest.approx(100 * (own / base - 1))
    assert found["perplexity"] == pytest.approx(math.exp(own))


def test_the_baseline_is_compared_with_nothing(comparison) -> None:
    assert row(comparison.results, format="bf16")["difference"] is None
    assert row(comparison.best, format="bf16")["difference"] is None


@pytest.mark.parametrize(
    ("difference", "noise", "verdict"),
    [
        (Difference(5, 0.010, 0.005, 0.015), NOISE, "no difference"),
        (Difference(5, -0.010, -0.015, -0.005), NOISE, "no difference"),
        (Difference(5, 0.030, 0.010, 0.050), NOISE, "worse"),
        (Difference(5, -0.030, -0.050, -0.010), NOISE, "better"),
        (Difference(5, 0.030, -0.010, 0.070), NOISE, "worse (indication)"),  # own floor 0.028
        (Difference(5, 0.030, -0.020, 0.080), NOISE, "no difference"),  # own floor 0.035
        (Difference(4, 0.030, 0.010, 0.050), NOISE, "worse (indication)"),
        (Difference(1, 0.030, math.nan, math.nan), NOISE, "worse (indication)"),
        (Difference(1, 0.020, math.nan, math.nan), NOISE, "no difference"),
        (Difference(1, 0.500, math.nan, math.nan), None, "not judged"),
        (Difference(2, 0.0, 0.0, 0.0), NOISE, "identical"),
        (Difference(1, 0.0, math.nan, math.nan), None, "identical"),
        (Difference(2, 0.0, -0.1, 0.1), NOISE, "no difference"),
        (None, NOISE, "not judged"),
    ],
)
def test_a_difference_is_judged_by_the_floor_then_by_seeds_and_interval(difference, noise, verdict: str) -> None:
    assert judge(difference, noise) == verdict


def test_the_best_learning_rate_has_most_completed_seeds_then_least_loss(made) -> None:
    study = made(["bf16", "E3M4"], lr_scales=(0.25, 1, 4), diverged={"E3M4-adamw-0-1": 40})
    best = compare(study).best
    assert row(best, format="bf16")["lr_scale"] == 1 and row(best, format="bf16")["bracket"] == "bracketed"
    found = row(best, format="E3M4")
    assert found["lr_scale"] in (0.25, 4) and found["bracket"] == "unbracketed"
    assert found["difference"].n == 2


def test_gain_is_the_plain_loss_minus_the_aware_loss_each_at_its_best(made, tmp_path: Path) -> None:
    arms = {"stiff_update": {"stiffness": "ulp"}, "permuted": {"stiffness": "permuted"}}
    study = made(["bf16", "E7M0"], ["adamw", "stiff_update", "permuted"], arms=arms)
    comparison = compare(study)
    assert comparison.reference == "adamw"
    by_hand = [
        loss(tmp_path, f"E7M0-stiff_update-{seed}-1") - loss(tmp_path, f"E7M0-adamw-{seed}-1") for seed in (0, 1)
    ]
    found = row(comparison.gains, format="E7M0", optimizer="stiff_update")
    assert found["difference"].mean == pytest.approx(sum(by_hand) / 2)
    assert found["verdict"] == "better (indication)" and not found["control"]
    null = row(comparison.gains, format="E7M0", optimizer="permuted")
    assert null["control"] and null["verdict"] == "no difference"


def test_a_gain_is_read_against_its_null_arms_and_at_matched_size(made, tmp_path: Path) -> None:
    """The made-up stiff_update gains and nothing else does, so it beats its shuffled twin; the matched one does not."""
    arms = {
        "stiff_update": {"stiffness": "ulp"}, "shuffled": {"stiffness": "permuted"},
        "other": {"stiffness": "permuted", "acts": "gradient"}, "matched": {"stiffness": "ulp", "match_rms": True},
    }  # fmt: skip
    gains = compare(made(["bf16", "E7M0"], ["adamw", *arms], lr_scales=(0.25, 1, 4), arms=arms)).gains
    found = row(gains, format="E7M0", optimizer="stiff_update")
    assert found["nulls"] == {"shuffled": "better (indication)"}
    assert found["matched"] == "no difference" and found["bracketed"]
    assert row(gains, format="E7M0", optimizer="shuffled")["nulls"] == {}
    assert row(gains, format="E7M0", optimizer="matched")["matched"] == ""


def test_no_gain_counts_that_arms_show_where_nothing_is_quantized(made, tmp_path: Path) -> None:
    """There they differ in the learning rates they were tried with alone; more seeds do not take that away."""
    arms = {"stiff_update": {"stiffness": "ulp"}, "permuted": {"stiffness": "permuted"}}
    comparison = compare(made(["bf16", "E7M0"], ["adamw", *arms], arms=arms))
    by_hand = [
        abs(sum(loss(tmp_path, f"bf16-{arm}-{seed}-1") - loss(tmp_path, f"bf16-adamw-{seed}-1") for seed in (0, 1)) / 2)
        for arm in arms
    ]
    assert comparison.gain_noise.least == pytest.approx(max(by_hand)) and max(by_hand) > 0
    assert comparison.gain_noise.floor(1000) == comparison.gain_noise.least
    without = comparison.gains[comparison.gains["format"] == "bf16"]
    assert set(without["verdict"]) == {"no difference"}


def test_weights_on_the_grid_are_compared_with_the_plain_arm_on_the_grid(made) -> None:
    arms = {name: {"weights": "grid", **more} for name, more in (("sr", {}), ("stiff_sr", {"stiffness": "ulp"}))}
    comparison = compare(made(["E7M0"], ["adamw", *arms], arms=arms))
    assert comparison.references == {"master": "adamw", "grid": "sr"} and comparison.reference == "adamw"
    assert list(comparison.gains["optimizer"]) == ["stiff_sr"] and set(comparison.gains["reference"]) == {"sr"}
    without = compare(made(["E7M0"], ["adamw", "stiff_sr"], arms=arms))
    assert without.gains.empty


@pytest.mark.parametrize(
    ("arm", "plain", "null"),
    [
        ({"base": "adamw"}, True, False),
        ({"base": "sgd", "stiffness": None}, True, False),
        ({"base": "adamw", "stiffness": "ulp"}, False, False),
        ({"base": "adamw", "stiffness": "permuted"}, False, True),
        ({"base": "riemann"}, False, False),
    ],
)
def test_an_arm_is_plain_when_nothing_in_it_looks_at_the_grid(arm, plain: bool, null: bool) -> None:
    assert is_plain(arm) == plain and is_null(arm) == null


def test_twins_that_repeat_each_other_agree_to_the_bit(study) -> None:
    control = check_twins(study)
    assert control.agrees and control.pairs == 2 and control.values > 20


def change(study, key: str, column: str, edit) -> None:
    name, _, seed, _ = key.split("-")
    rows = (study.history["format"] == name) & (study.history["seed"] == int(seed))
    position = study.history.index[rows & study.history[column].notna()][-1]
    study.history.loc[position, column] = edit(study.history.loc[position, column])


def test_twins_that_differ_in_the_last_bit_disagree(made) -> None:
    study = made(["E0M7", "E1M6"])
    change(study, "E0M7-adamw-1-1", "grad_norm", lambda x: math.nextafter(x, 9))
    control = check_twins(study)
    assert not control.agrees and 0 < control.max_difference < 1e-12


def test_twins_that_end_differently_disagree_without_bound(made) -> None:
    assert check_twins(made(["E0M7", "E1M6"], diverged={"E0M7-adamw-0-1": 40})).max_difference == math.inf


def test_without_both_twins_there_is_no_control(made) -> None:
    assert check_twins(made(["bf16", "E1M6"])) is None


def met(study) -> dict[str, str]:
    found = conditions(study, compare(study), check_twins(study))
    return {condition.name: condition.met for condition in found}


def test_fairness_of_a_small_grid_is_reported_as_it_is(study) -> None:
    found = met(study)
    assert found["Learning rate tuned per arm, optimum bracketed"] == "no"
    assert found["E0M7 and E1M6 agree to the bit"] == "yes"
    assert found["Paired seeds, enough for a claim"] == "partly"
    assert found["Null arms that carry no geometry"] == "does not apply"


def test_fairness_of_a_tuned_grid_with_null_arms(made) -> None:
    arms = {"stiff": {"stiffness": "ulp"}, "mean": {"stiffness": "mean"}}
    study = made(["bf16"], ["adamw", "stiff", "mean"], (0, 1, 2, 3, 4), (0.25, 1, 4), arms=arms)
    found = met(study)
    assert found["Learning rate tuned per arm, optimum bracketed"] == "yes"
    assert found["Paired seeds, enough for a claim"] == "yes"
    assert found["Null arms that carry no geometry"] == "yes"
    assert found["Second control with matched update size"] == "no"


def test_cost_and_precision_are_ranked_over_distinct_formats(study, comparison) -> None:
    table = explanation(study, comparison)
    rho, n = correlations(table)["weight_sqnr"]
    assert n == 5 and rho < 0  # six formats beside the baseline; E0M7 repeats E1M6
    assert "grad_sqnr" not in correlations(table)  # every format's gradients are in E5M2


def test_flags_are_raised_beyond_a_limit_and_only_there(study, comparison) -> None:
    flags = raised(study, comparison)
    gap = row(comparison.results, format="E7M0")["val_gap"]
    found = row(flags, what="validation loss above the baseline's (%)")
    assert gap > 10 and (found["format"], found["value"], found["limit"]) == ("E7M0", gap, 10.0)
    above = flags["value"] > flags["limit"]
    assert (above | (flags["what"] == "gradient SNR (dB)")).all()
    study.monitors.loc[study.monitors["metric"] == "kurtosis", "value"] += 100
    try:
        more = raised(study, comparison)
        assert len(more) - len(flags) == len(study.cells[study.cells["status"] != "missing"])
    finally:
        study.monitors.loc[study.monitors["metric"] == "kurtosis", "value"] -= 100


def test_the_primary_metric_is_the_final_validation_loss() -> None:
    assert c.PRIMARY == "val_loss"
