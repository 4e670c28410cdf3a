"""What a report may say of its losses. Oracles: losses with a known difference, metrics.json, arithmetic by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from altgrad.reporting import optimizer_roles as roles
from altgrad.reporting.compare import BEYOND, CONTROL, COST, GAIN, Questions, answer, compare
from altgrad.reporting.fairness import conditions
from altgrad.reporting.statistics import IDENTICAL, LOWER, TOO_FEW, TUNED_HERE, PairedLosses
from tests.reporting.made_losses import ADAMW, FORMATS, STIFF, losses_of, study_of

SGD = {"base": "sgd"}


def read(losses, arms, baseline: str = "E5M2"):
    return compare(study_of(losses, arms, baseline)).claims


def test_a_large_gain_is_significant_with_five_seeds_and_not_tested_with_four() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    gain = {("E3M4", "stiff"): 0.2}
    found = read(losses_of(arms, gain), arms)
    assert found[GAIN, "E3M4", "stiff"].outcome == LOWER
    assert not found[GAIN, "E4M3", "stiff"].significant
    for seeds in (1, 4):
        assert read(losses_of(arms, gain, seeds=seeds), arms)[GAIN, "E3M4", "stiff"].outcome == TOO_FEW


def test_a_format_that_repeats_another_is_no_further_question() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of(arms, {("E1M6", "stiff"): 0.03})
    twice = losses | {("E0M7", arm): losses["E1M6", arm] for arm in arms}
    once, both = read(losses, arms), read(twice, arms)
    assert both[GAIN, "E0M7", "stiff"] == both[GAIN, "E1M6", "stiff"] == once[GAIN, "E1M6", "stiff"]
    assert both[COST, "E0M7"] == once[COST, "E1M6"]
    same = read(losses | {("E3M4", "stiff"): losses["E3M4", "adamw"]}, arms)
    assert same[GAIN, "E3M4", "stiff"].outcome == IDENTICAL


def test_a_repetition_is_no_further_question_where_another_kind_of_question_came_first() -> None:
    losses = np.random.default_rng(0).normal(3.5, 0.001, 5)
    formats = {"base": losses, "E1M6": losses + np.linspace(0.01, 0.012, 5)}
    runs = PairedLosses.of(
        [((entry, "adamw", 1), seed, loss) for entry, own in formats.items() for seed, loss in enumerate(own)], range(5)
    )
    contrast = {("E1M6", "adamw", 1): 1, ("base", "adamw", 1): -1}
    gains = [(GAIN, entry, "stiff") for entry in ("E1M6", "E0M7")]
    once, twice = (
        answer(Questions(dict.fromkeys([(COST, "E1M6"), *asked], contrast), {}, set()), runs, {}, tuned_here=False)
        for asked in (gains[:1], gains)
    )
    assert twice[gains[0]] == twice[gains[1]] == once[gains[0]]
    assert once[gains[0]].adjusted < 0.05


def test_rates_chosen_on_the_seeds_that_are_compared_allow_no_test() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = {(*run, 1): values for run, values in losses_of(arms, {("E3M4", "stiff"): 0.5}).items()}
    losses |= {(entry, arm, 2): values + 0.1 for (entry, arm, _), values in list(losses.items())}
    found = read(losses, arms)
    assert found[GAIN, "E3M4", "stiff"].outcome == TUNED_HERE
    assert not any(claim.significant for claim in found.values())


# --- references ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "reference"),
    [
        (STIFF | {"stiffness": "profile", "knee": 7.0, "slope": 1.0}, "adamw"),
        (STIFF, "adamw"), ({"base": "riemann_adam", "stiffness": "ulp"}, "adamw"), ({"base": "madam"}, "adamw"),
        ({"base": "muon"}, "adamw"),
        (SGD | {"stiffness": "ulp"}, "sgd"), ({"base": "riemann_sgd", "stiffness": "ulp"}, "sgd"),
        ({"base": "rung", "weights": "quantized", "rounding": "stochastic"}, "adamw_sr_weights"),
        (STIFF | {"weights": "quantized", "rounding": "nearest"}, "adamw_nearest"),
        (ADAMW | {"weights": "quantized", "rounding": "nearest", "feedback": "momentum"}, "adamw_nearest"),
        (SGD | {"stiffness": "ulp", "weights": "quantized"}, None),
    ],
)  # fmt: skip
def test_an_arm_is_held_against_the_plain_arm_of_its_base_and_regime(arm, reference) -> None:
    quantized = {"weights": "quantized"}
    arms = {
        "sgd": SGD, "adamw": ADAMW, "adamw_sr_weights": ADAMW | quantized | {"rounding": "stochastic"},
        "adamw_nearest": ADAMW | quantized | {"rounding": "nearest"}, "arm": arm,
    }  # fmt: skip
    study = study_of({("E3M4", name): [3.0, 3.1] for name in arms}, arms, "E3M4")
    assert roles.references(study).get("arm") == reference
    name = "Every optimizer held against the baseline optimizer of its base and weight storage"
    assert conditions(study, compare(study))[name][0] == ("yes" if reference else "no")


def test_the_gap_between_sgd_and_adamw_is_no_noise() -> None:
    """In bf16 SGD ends 0.5 above AdamW; a gain of 0.1 of stiff SGD over SGD is found all the same."""
    arms = {"adamw": ADAMW, "sgd": SGD, "spacing_sgd": SGD | {"stiffness": "ulp"}}
    level = {(entry, arm): -0.5 for entry in ["bf16", *FORMATS] for arm in ("sgd", "spacing_sgd")}
    level["E3M4", "spacing_sgd"] += 0.1
    losses = losses_of(arms, level, ["bf16", *FORMATS])
    losses["bf16", "spacing_sgd"] = losses["bf16", "sgd"] + 0.003
    comparison = compare(study_of(losses, arms))
    assert comparison.least["spacing_sgd"] == pytest.approx(0.003)
    assert comparison.claims.get((GAIN, "E3M4", "spacing_sgd")).outcome == LOWER


def test_no_gain_counts_that_tuning_alone_makes_where_nothing_is_quantized() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of(arms, {("E3M4", "stiff"): 0.2}, ["bf16", *FORMATS])
    assert read(losses, arms)[GAIN, "E3M4", "stiff"].outcome == LOWER
    losses["bf16", "stiff"] = losses["bf16", "adamw"] - 0.25
    found = read(losses, arms)
    assert not found[GAIN, "E3M4", "stiff"].significant
    assert not found[GAIN, "bf16", "stiff"].significant


# --- controls --------------------------------------------------------------------------------------

CONTROLS = {
    "adamw": ADAMW, "stiff": STIFF, "shuffled": STIFF | {"stiffness": "permuted"},
    "foreign": STIFF | {"stiffness": "foreign", "foreign": "E5M2"}, "matched": STIFF | {"match_rms": True},
    "elsewhere": STIFF | {"stiffness": "permuted", "acts": "gradient"},
    "profile": STIFF | {"stiffness": "profile", "knee": 7.0, "slope": 1.0},
    "profile_matched": STIFF | {"stiffness": "profile", "knee": 7.0, "slope": 1.0, "match_rms": True},
}  # fmt: skip


def test_a_foreign_geometry_is_a_question_and_no_null_arm() -> None:
    gains = compare(study_of(losses_of(CONTROLS), CONTROLS, "E5M2")).gains
    found = gains[(gains["format"] == "E3M4") & (gains["optimizer"] == "stiff")].iloc[0]
    assert list(found["controls"]) == ["`shuffled`", "`foreign`", "RMS-matched"] and found["beyond"] is None


def test_a_baseline_optimizer_is_one_that_others_are_held_against() -> None:
    plain = ADAMW | {"weights": "quantized"}
    arms = {"plain": plain, "fed back": plain | {"feedback": "momentum"}, "muon": {"base": "muon"}}
    assert roles.plain(study_of({("E3M4", arm): [3.0] for arm in arms}, arms)) == ["plain"]


def test_what_a_control_gains_is_exploratory() -> None:
    arms = {name: CONTROLS[name] for name in ("adamw", "stiff", "shuffled", "profile")}
    gain = {("E3M4", arm): 0.3 for arm in ("stiff", "shuffled", "profile")}
    found = read(losses_of(arms, gain), arms)
    assert found[GAIN, "E3M4", "stiff"].outcome == LOWER
    for control in ("shuffled", "profile"):
        assert found[GAIN, "E3M4", control].significant and found[GAIN, "E3M4", control].exploratory
    assert not found[CONTROL, "E3M4", "stiff", "shuffled"].significant
    worse = read(losses_of(arms, {("E3M4", "shuffled"): -0.3}), arms)  # the control alone differs from AdamW
    assert not worse[GAIN, "E3M4", "stiff"].significant
    assert not worse[CONTROL, "E3M4", "stiff", "shuffled"].significant


def test_the_gain_of_the_format_is_what_its_virtual_twin_does_not_have() -> None:
    """Of a gain of 0.3 in E3M4 its geometry alone has 0.1; of E2M5's 0.3 all. By hand: the mean of four losses."""
    arms = {"adamw": ADAMW, "stiff": STIFF}
    formats = ["bf16", *FORMATS, "virtual.E3M4", "virtual.E2M5"]
    gain = {("E3M4", "stiff"): 0.3, ("virtual.E3M4", "stiff"): 0.1, ("E2M5", "stiff"): 0.3,
            ("virtual.E2M5", "stiff"): 0.3}  # fmt: skip
    losses = losses_of(arms, gain, formats)
    for entry in ("virtual.E3M4", "virtual.E2M5"):  # nothing quantizes it, so the plain arm trains it as it does bf16
        losses[entry, "adamw"] = losses["bf16", "adamw"]
    losses["bf16", "stiff"] = losses["bf16", "adamw"]
    study = study_of(losses, arms)
    comparison = compare(study)
    beyond = {entry: comparison.claims.get((BEYOND, entry, "stiff")) for entry in formats}
    by_hand = np.mean(
        losses["E3M4", "stiff"] - losses["E3M4", "adamw"]
        - losses["virtual.E3M4", "stiff"] + losses["virtual.E3M4", "adamw"]
    )  # fmt: skip
    assert beyond["E3M4"].difference.mean == pytest.approx(by_hand) and beyond["E3M4"].outcome == LOWER
    assert not beyond["E2M5"].significant and beyond["E4M3"] is None
    assert comparison.claims.get((GAIN, "virtual.E3M4", "stiff")).outcome == LOWER
    assert comparison.claims.get((COST, "virtual.E3M4")) is None
    assert comparison.least["stiff"] == 0  # a virtual entry is not one where there is nothing to gain
    name = "Unquantized control (`virtual.`), the same spacing without the format"
    assert conditions(study, comparison)[name] == ("partly", "none for E5M2, E4M3 and E1M6")


def test_a_control_has_the_format_and_the_scales_of_the_weights() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    study = study_of(losses_of(arms, None, ["E4M3", "E3M4", "virtual.E4M3"]), arms, "E4M3")
    assert roles.unquantized_controls(study) == {"E4M3": "virtual.E4M3"}
    for rule in study.entry("E4M3")["rules"]:
        rule["weight"] |= {"granularity": "block", "block": 32}
    assert roles.unquantized_controls(study) == {}


def test_one_bad_run_changes_no_comparison_but_its_own() -> None:
    """A seed of one optimizer that ends at ln V in one format; every other question has the same p by itself."""
    arms = {"adamw": ADAMW, "stiff": STIFF, "other": STIFF | {"power": 2}}
    losses = losses_of(arms, {("E3M4", "stiff"): 0.05})
    clean = read(losses, arms)
    losses["E4M3", "other"] = np.where(np.arange(len(losses["E4M3", "other"])) == 3, 11.0, losses["E4M3", "other"])
    for question, result in read(losses, arms).items():
        changed = question == (GAIN, "E4M3", "other")
        assert (result.difference == clean[question].difference) != changed, question


# --- runs of a project on disk ---------------------------------------------------------------------


def loss(project: Path, key: str) -> float:
    return json.loads((project / f"data/runs/{key}/metrics.json").read_text())["val_loss"]


def row(frame, **values):
    for name, value in values.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_difference_to_the_baseline_is_the_mean_over_shared_seeds(project: Path, comparison) -> None:
    differences = [loss(project, f"E4M3-adamw-{seed}-1") - loss(project, f"bf16-adamw-{seed}-1") for seed in (0, 1)]
    found = row(comparison.best, format="E4M3")
    assert found["difference"].mean == pytest.approx(sum(differences) / 2, rel=1e-12)
    assert found["difference"].n == 2
    assert row(comparison.best, format="bf16")["difference"] is None
    own, base = loss(project, "E5M2-adamw-0-1"), loss(project, "bf16-adamw-0-1")
    one_seed = row(comparison.best, format="E5M2")
    assert one_seed["difference"].mean == pytest.approx(own - base)
    assert one_seed["perplexity"] == pytest.approx(math.exp(own))


def test_a_diverged_or_missing_run_is_counted_and_never_averaged(project: Path, comparison) -> None:
    diverged, missing = row(comparison.best, format="E7M0"), row(comparison.best, format="E5M2")
    assert (diverged["completed"], diverged["diverged"], diverged["difference"].n) == (1, 1, 1)
    assert (missing["completed"], missing["missing"]) == (1, 1)
    assert diverged["val_loss"] == loss(project, "E7M0-adamw-0-1")


def test_the_best_learning_rate_has_most_completed_seeds_then_least_loss(made) -> None:
    study = made(["bf16", "E3M4"], lr_scales=(0.25, 1, 4), diverged={"E3M4-adamw-0-1": 40})
    best = compare(study).best
    assert row(best, format="bf16")["lr_scale"] == 1 and row(best, format="bf16")["bracket"] == "bracketed"
    found = row(best, format="E3M4")
    assert found["lr_scale"] in (0.25, 4) and found["bracket"] == "unbracketed"
    assert found["difference"].n == 2


def test_learning_rates_are_compared_on_the_seeds_that_they_share(made) -> None:
    """An easy seed that only the worse rate completed must not make it the best."""
    lost = {"bf16-adamw-0-1": 40, "bf16-adamw-2-0.25": 40}
    study = made(["bf16"], seeds=(0, 1, 2), lr_scales=(0.25, 1), diverged=lost)
    cells = study.cells
    cells.loc[:, "val_loss"] = cells["val_loss"].where(cells["seed"] != 0, 0.5)
    assert row(compare(study).best, format="bf16")["lr_scale"] == 1


def test_a_rate_that_lost_all_its_seeds_is_never_the_best(made) -> None:
    lost = {f"bf16-adamw-{seed}-1": 40 for seed in (0, 1)}
    assert row(compare(made(["bf16"], lr_scales=(0.25, 1), diverged=lost)).best, format="bf16")["lr_scale"] == 0.25
