"""What a report may say of its losses. Oracle: losses with a known difference, and arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from altgrad.reporting import roles
from altgrad.reporting.claims import BEYOND, COST, GAIN, NULL
from altgrad.reporting.compare import compare
from altgrad.reporting.fairness import conditions
from altgrad.reporting.results import HIGHER, IDENTICAL, LOWER, TOO_FEW, TUNED_HERE, Result
from tests.reporting.made_losses import ADAMW, STIFF, study_of

FORMATS = ["E5M2", "E4M3", "E3M4", "E2M5", "E1M6"]
SGD = {"base": "sgd"}


def noisy(level: float, seeds: int = 5, key: int = 0, sd: float = 0.01) -> np.ndarray:
    """Return losses around ``level`` with a shift per seed that all runs share and noise of their own."""
    shift = 0.03 * np.random.default_rng(99).standard_normal(seeds)
    return level + shift + sd * np.random.default_rng(key).standard_normal(seeds)


def losses_of(arms: dict, gain: dict | None = None, formats: list[str] = FORMATS, **options) -> dict:
    """Return noisy losses of every entry and arm, lowered by ``gain`` of (entry, arm)."""
    keys = {pair: i for i, pair in enumerate((entry, arm) for entry in formats for arm in arms)}
    return {pair: noisy(3.5 - (gain or {}).get(pair, 0.0), key=i, **options) for pair, i in keys.items()}


def read(losses, arms, baseline: str = "E5M2"):
    return compare(study_of(losses, arms, baseline)).answers


def test_a_large_gain_is_significant_with_five_seeds_and_not_tested_with_four() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    gain = {("E3M4", "stiff"): 0.2}
    found = read(losses_of(arms, gain), arms)
    assert found.of(GAIN, "E3M4", "stiff").outcome == LOWER
    assert not found.of(GAIN, "E4M3", "stiff").significant
    few = read(losses_of(arms, gain, seeds=4), arms)
    assert few.of(GAIN, "E3M4", "stiff").outcome == TOO_FEW
    one = read(losses_of(arms, gain, seeds=1), arms)
    assert one.of(GAIN, "E3M4", "stiff").outcome == TOO_FEW


def test_a_loss_and_a_gain_of_one_size_are_judged_alike() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    down = losses_of(arms, {("E3M4", "stiff"): 0.2})
    up = {run: 7 - values for run, values in down.items()}
    better, worse = (read(losses, arms).of(GAIN, "E3M4", "stiff") for losses in (down, up))
    assert (better.outcome, worse.outcome) == (LOWER, HIGHER)
    assert better.adjusted == pytest.approx(worse.adjusted)


def test_runs_that_are_equal_to_the_last_bit_are_identical() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of(arms)
    losses["E3M4", "stiff"] = losses["E3M4", "adamw"]
    assert read(losses, arms).of(GAIN, "E3M4", "stiff").outcome == IDENTICAL


def test_a_format_that_repeats_another_is_no_further_question() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of(arms, {("E1M6", "stiff"): 0.03})
    twice = losses | {("E0M7", arm): losses["E1M6", arm] for arm in arms}
    once, both = read(losses, arms), read(twice, arms)
    assert both.of(GAIN, "E0M7", "stiff") == both.of(GAIN, "E1M6", "stiff") == once.of(GAIN, "E1M6", "stiff")
    assert both.of(COST, "E0M7") == once.of(COST, "E1M6")


def test_rates_chosen_on_the_seeds_that_are_compared_allow_no_test() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = {(*run, 1): values for run, values in losses_of(arms, {("E3M4", "stiff"): 0.5}).items()}
    losses |= {(entry, arm, 2): values + 0.1 for (entry, arm, _), values in list(losses.items())}
    found = read(losses, arms)
    assert found.of(GAIN, "E3M4", "stiff").outcome == TUNED_HERE
    assert not any(claim.significant for claim in found.claims.values())


def test_every_further_arm_raises_the_bar() -> None:
    few = {"adamw": ADAMW, "stiff": STIFF}
    many = few | {f"other{power}": STIFF | {"power": power} for power in range(2, 8)}
    gain = {("E3M4", "stiff"): 0.03}
    a = read({(e, arm): v for (e, arm), v in losses_of(many, gain).items() if arm in few}, few)
    b = read(losses_of(many, gain), many)
    assert b.of(GAIN, "E3M4", "stiff").adjusted > 2 * a.of(GAIN, "E3M4", "stiff").adjusted


# --- references ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "reference"),
    [
        (STIFF | {"stiffness": "profile", "knee": 7.0, "slope": 1.0}, "adamw"),
        (STIFF, "adamw"), ({"base": "riemann_adam", "stiffness": "ulp"}, "adamw"), ({"base": "madam"}, "adamw"),
        ({"base": "muon"}, "adamw"),
        (SGD | {"stiffness": "ulp"}, "sgd"), ({"base": "riemann_sgd", "stiffness": "ulp"}, "sgd"),
        ({"base": "rung", "weights": "quantized", "rounding": "stochastic"}, "adamw_sr"),
        (STIFF | {"weights": "quantized", "rounding": "nearest"}, "adamw_nearest"),
        (ADAMW | {"weights": "quantized", "rounding": "nearest", "feedback": "momentum"}, "adamw_nearest"),
        (SGD | {"stiffness": "ulp", "weights": "quantized"}, None),
    ],
)  # fmt: skip
def test_an_arm_is_held_against_the_plain_arm_of_its_base_and_regime(arm, reference) -> None:
    quantized = {"weights": "quantized"}
    arms = {
        "sgd": SGD, "adamw": ADAMW, "adamw_sr": ADAMW | quantized | {"rounding": "stochastic"},
        "adamw_nearest": ADAMW | quantized | {"rounding": "nearest"}, "arm": arm,
    }  # fmt: skip
    study = study_of({("E3M4", name): [3.0, 3.1] for name in arms}, arms, "E3M4")
    assert roles.references(study).get("arm") == reference
    condition = met(study)["Every optimizer held against the baseline optimizer of its base and weight storage"]
    assert condition == ("yes" if reference else "no")


def test_the_gap_between_sgd_and_adamw_is_no_noise() -> None:
    """In bf16 SGD ends 0.5 above AdamW; a gain of 0.1 of stiff SGD over SGD is found all the same."""
    arms = {"adamw": ADAMW, "sgd": SGD, "stiff_sgd": SGD | {"stiffness": "ulp"}}
    level = {(entry, arm): -0.5 for entry in ["bf16", *FORMATS] for arm in ("sgd", "stiff_sgd")}
    level["E3M4", "stiff_sgd"] += 0.1
    losses = losses_of(arms, level, ["bf16", *FORMATS])
    losses["bf16", "stiff_sgd"] = losses["bf16", "sgd"] + 0.003
    comparison = compare(study_of(losses, arms))
    assert comparison.least["stiff_sgd"] == pytest.approx(0.003)
    assert comparison.answers.of(GAIN, "E3M4", "stiff_sgd").outcome == LOWER


def test_no_gain_counts_that_tuning_alone_makes_where_nothing_is_quantized() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of(arms, {("E3M4", "stiff"): 0.2}, ["bf16", *FORMATS])
    assert read(losses, arms).of(GAIN, "E3M4", "stiff").outcome == LOWER
    losses["bf16", "stiff"] = losses["bf16", "adamw"] - 0.25
    found = read(losses, arms)
    assert not found.of(GAIN, "E3M4", "stiff").significant
    assert not found.of(GAIN, "bf16", "stiff").significant


# --- controls --------------------------------------------------------------------------------------

CONTROLS = {
    "adamw": ADAMW, "stiff": STIFF, "shuffled": STIFF | {"stiffness": "permuted"},
    "foreign": STIFF | {"stiffness": "foreign", "foreign": "E5M2"}, "matched": STIFF | {"match_rms": True},
    "elsewhere": STIFF | {"stiffness": "permuted", "acts": "gradient"},
    "profile": STIFF | {"stiffness": "profile", "knee": 7.0, "slope": 1.0},
    "profile_matched": STIFF | {"stiffness": "profile", "knee": 7.0, "slope": 1.0, "match_rms": True},
}  # fmt: skip


def test_a_foreign_geometry_is_a_question_and_no_null_arm() -> None:
    assert roles.is_null(CONTROLS["shuffled"]) and not roles.is_null(CONTROLS["foreign"])
    gains = compare(study_of(losses_of(CONTROLS), CONTROLS, "E5M2")).gains
    found = gains[(gains["format"] == "E3M4") & (gains["optimizer"] == "stiff")].iloc[0]
    assert set(found["nulls"]) == {"shuffled"} and set(found["foreign"]) == {"foreign"}
    assert isinstance(found["matched"], Result) and found["beyond"] is None


def test_a_baseline_optimizer_is_one_that_others_are_held_against() -> None:
    plain = ADAMW | {"weights": "quantized"}
    arms = {"plain": plain, "fed back": plain | {"feedback": "momentum"}, "muon": {"base": "muon"}}
    assert roles.plain(study_of({("E3M4", arm): [3.0] for arm in arms}, arms)) == ["plain"]


def test_what_a_control_gains_is_exploratory() -> None:
    arms = {name: CONTROLS[name] for name in ("adamw", "stiff", "shuffled", "profile")}
    gain = {("E3M4", arm): 0.3 for arm in ("stiff", "shuffled", "profile")}
    found = read(losses_of(arms, gain), arms)
    assert found.of(GAIN, "E3M4", "stiff").outcome == LOWER
    for control in ("shuffled", "profile"):
        assert found.of(GAIN, "E3M4", control).significant and found.of(GAIN, "E3M4", control).exploratory
    assert not found.of(NULL, "E3M4", "stiff", "shuffled").significant


def test_a_control_has_nothing_to_say_where_there_is_no_gain() -> None:
    """The arm beats its null there only because the null is worse than the plain arm."""
    arms = {name: CONTROLS[name] for name in ("adamw", "stiff", "shuffled")}
    found = read(losses_of(arms, {("E3M4", "shuffled"): -0.3}), arms)
    assert not found.of(GAIN, "E3M4", "stiff").significant
    assert not found.of(NULL, "E3M4", "stiff", "shuffled").significant


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
    beyond = {entry: comparison.answers.of(BEYOND, entry, "stiff") for entry in formats}
    by_hand = np.mean(
        losses["E3M4", "stiff"] - losses["E3M4", "adamw"]
        - losses["virtual.E3M4", "stiff"] + losses["virtual.E3M4", "adamw"]
    )  # fmt: skip
    assert beyond["E3M4"].difference.mean == pytest.approx(by_hand) and beyond["E3M4"].outcome == LOWER
    assert not beyond["E2M5"].significant and beyond["E4M3"] is None
    assert comparison.answers.of(GAIN, "virtual.E3M4", "stiff").outcome == LOWER
    assert comparison.answers.of(COST, "virtual.E3M4") is None
    assert comparison.least["stiff"] == 0  # a virtual entry is not one where there is nothing to gain
    assert met(study)["Unquantized control (`virtual.`), the same spacing without the format"] == "partly"


def test_a_twin_must_have_the_format_of_the_weights() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    study = study_of(losses_of(arms, None, ["E3M4", "virtual.E4M3"]), arms, "E3M4")
    assert roles.unquantized_controls(study) == {}


def test_the_spread_between_two_gains_is_that_of_four_runs() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of(arms, {("E3M4", "stiff"): 0.5}, seeds=400)
    comparison = compare(study_of(losses, arms, "E5M2"))
    assert math.sqrt(comparison.answers.spreads[GAIN].variance) == pytest.approx(0.01 * math.sqrt(2), rel=0.05)
    there = {("virtual.E3M4", arm): noisy(3.5, 400, key) for key, arm in enumerate(arms, start=50)}
    comparison = compare(study_of(losses | there, arms, "E5M2"))
    assert comparison.answers.of(BEYOND, "E3M4", "stiff").difference.sd == pytest.approx(0.02, rel=0.15)


# --- fairness --------------------------------------------------------------------------------------


ONE_CLASS = "Runs of a seed trained on one class of machine"


def met(study) -> dict[str, str]:
    return {name: found for name, (found, _) in conditions(study, compare(study)).items()}


def test_every_condition_can_fail_and_can_be_met() -> None:
    """Two grids between which no condition is met in both, but those that have tests of their own."""
    good_arms = {name: CONTROLS[name] for name in ("adamw", "stiff", "shuffled", "matched")}
    good = met(study_of(losses_of(good_arms, None, ["E3M4", "virtual.E3M4"]), good_arms, "E3M4"))
    bad_arms = {"adamw": ADAMW, "stiff": STIFF | {"plain_lr": 2, "decay": 0.1}, "stiff_sgd": SGD | {"stiffness": "ulp"}}
    losses = losses_of(bad_arms, None, ["E3M4"], seeds=1)
    bad_losses = {(*run, rate): values for run, values in losses.items() for rate in (1, 2)}
    bad_losses["E3M4", "adamw", 2] = [None]
    bad_study = study_of(bad_losses, bad_arms, "E3M4")
    bad_study.cells["steps"] = 5.0
    bad = met(bad_study)
    never = {name for name in good if good[name] == bad[name]} - {ONE_CLASS}
    assert never == {"Learning rate tuned per optimizer, optimum bracketed"}  # needs three rates: tested below
    assert all(value == "yes" for name, value in good.items() if name not in never | {ONE_CLASS})


@pytest.mark.parametrize(
    ("classes", "met", "words"),
    [("aaaaaa", "yes", "a"), ("aabbaa", "yes", "a and b"), ("aababb", "partly", "seed 1: a and b; others"),
     ("ababab", "no", "seed 0: a and b; seed 1: a and b; seed 2: a and b; others")],
)  # fmt: skip
def test_seeds_are_compared_on_one_class_of_machine(classes: str, met: str, words: str) -> None:
    """Each of three seeds has two arms; other seeds may be elsewhere."""
    arms = {"adamw": ADAMW, "stiff": STIFF}
    study = study_of({("E3M4", arm): [3.0, 3.1, 3.2] for arm in arms}, arms, "E3M4")
    keys = sorted(study.cells.index, key=lambda key: study.cells.at[key, "seed"])
    study.timing.update({key: {"machine_class": one} for key, one in zip(keys, classes, strict=True)})
    found, reason = conditions(study, compare(study))[ONE_CLASS]
    assert found == met and reason.startswith(words)


def test_cells_without_a_class_are_told_apart_by_processor_and_torch() -> None:
    study = study_of({("E3M4", arm): [3.0] for arm in ("adamw", "stiff")}, {"adamw": ADAMW, "stiff": STIFF}, "E3M4")
    timings = [{"machine": "a", "versions": {"torch": torch}} for torch in ("1", "2")]
    study.timing.update(dict(zip(study.cells.index, timings, strict=True)))
    found, reason = conditions(study, compare(study))[ONE_CLASS]
    assert found == "no" and reason.startswith("seed 0: a, torch 1 and a, torch 2")


def test_a_rate_inside_the_range_is_bracketed() -> None:
    arms = {"adamw": ADAMW}
    losses = {("E3M4", "adamw", rate): noisy(3.5 + abs(math.log2(rate))) for rate in (0.5, 1, 2)}
    assert met(study_of(losses, arms, "E3M4"))["Learning rate tuned per optimizer, optimum bracketed"] == "yes"
    assert met(study_of(losses, arms, "E3M4"))["Learning rates not chosen on the seeds that are compared"] == "no"


def test_runs_that_completed_at_no_rate_have_no_optimum_at_an_edge() -> None:
    name, rates = "Learning rate tuned per optimizer, optimum bracketed", (0.5, 1, 2)
    losses = {("E3M4", "adamw", rate): noisy(3.5 + abs(math.log2(rate))) for rate in rates}
    losses |= {("E4M3", "adamw", rate): [None] * 5 for rate in rates}
    losses |= {("E2M5", "adamw", rate): noisy(3.5 - rate) for rate in rates}

    def condition(*entries: str):
        study = study_of({run: own for run, own in losses.items() if run[0] in entries}, {"adamw": ADAMW}, "E3M4")
        return conditions(study, compare(study))[name]

    tried = "3 learning rates for every optimizer; "
    assert condition("E3M4", "E4M3") == ("partly", f"{tried}completed at no rate: E4M3 adamw")
    both = condition("E3M4", "E4M3", "E2M5")[1]
    assert both == f"{tried}optimum at an edge: E2M5 adamw at 2; completed at no rate: E4M3 adamw"
    assert condition("E4M3", "E2M5")[0] == "no"


@pytest.mark.parametrize(
    ("lost", "met", "counted"),
    [([], "yes", "5 seeds of the 5"), (["adamw"], "partly", "4 seeds of the 5"),
     (["stiff"], "partly", "4 to 5 seeds, by comparison, of the 5")],
)  # fmt: skip
def test_a_seed_counts_as_paired_where_both_runs_completed(lost: list[str], met: str, counted: str) -> None:
    """Five seeds, the first of which diverged in E3M4 under ``lost``: what is paired with that has four."""
    arms = {"adamw": ADAMW, "stiff": STIFF, "other": STIFF | {"power": 2}}
    losses = {run: list(values) for run, values in losses_of(arms, formats=["E3M4"]).items()}
    for arm in lost:
        losses["E3M4", arm][0] = None
    study = study_of(losses, arms, "E3M4")
    reason = f"{counted} that a test takes; a seed fixes initial weights and data order"
    assert conditions(study, compare(study))["Paired seeds, enough for a test"] == (met, reason)


def test_seeds_of_runs_that_nothing_is_compared_with_are_not_paired() -> None:
    study = study_of({("E3M4", "adamw"): noisy(3.5)}, {"adamw": ADAMW}, "E3M4")
    assert met(study)["Paired seeds, enough for a test"] == "does not apply"


def test_what_decay_leaves_is_given_as_a_number_for_each_arm() -> None:
    """Steps of 1 rise over the first and fall along half a cosine to 0.1: the product of 1 - decay x share, by hand."""
    arms = {"adamw": ADAMW, "stiff": STIFF | {"decay": 0.1}}
    study = study_of({("E3M4", arm): [3.0, 3.1] for arm in arms}, arms, "E3M4")
    shares = [1, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 9)) for k in range(1, 10))]
    kept = 100 * math.prod(1 - 0.1 * share for share in shares)
    decay = "Decay leaves the same share of the weights under every optimizer, over the run"
    found, reason = conditions(study, compare(study))[decay]
    assert found == "no" and f"stiff: {kept:.3g} % of a linear layer" in reason
