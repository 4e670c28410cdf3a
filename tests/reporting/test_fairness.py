"""What makes a comparison fair is met, or is not, for the reason that is said. Oracle: losses made for the test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from altgrad.config import load_params
from altgrad.reporting.compare import compare
from altgrad.reporting.fairness import QUESTION, conditions, load_tuning
from altgrad.reporting.load import Study
from altgrad.reporting.optimizer_roles import has_even_grid
from altgrad.reporting.study.runs import AFTER, COLUMNS
from tests.reporting.made_losses import ADAMW, STIFF, losses_of, noisy, study_of, with_formats

SHIPPED = Path(__file__).parents[2] / "params.yaml"
ARM = "adamw"
LOSSES = {0.5: [4.0, 4.1], 1: [3.0, 3.1], 2: [3.5, 3.2]}
SIZE = {"parameters": 168256, "steps": 200, "tokens": 204800}
ONE_CLASS = "Runs of a seed trained on one class of machine"
ENOUGH = "Enough text compared on to stand for other text"
TUNED = "Learning rate tuned per optimizer, optimum bracketed"


def met(study) -> dict[str, str]:
    return {name: found for name, (found, _) in conditions(study, compare(study)).items()}


def test_every_condition_can_fail_and_can_be_met() -> None:
    """Two grids between which no condition is met in both, but those that have tests of their own."""
    good_arms = {"adamw": ADAMW, "stiff": STIFF, "shuffled": STIFF | {"stiffness": "permuted"},
                 "matched": STIFF | {"match_rms": True}}  # fmt: skip
    good = met(study_of(losses_of(good_arms, None, ["E3M4", "virtual.E3M4"]), good_arms, "E3M4"))
    bad_arms = {"adamw": ADAMW, "stiff": STIFF | {"plain_lr": 2, "decay": 0.1},
                "spacing_sgd": {"base": "sgd", "stiffness": "ulp"}}  # fmt: skip
    losses = losses_of(bad_arms, None, ["E3M4"], seeds=1)
    bad_losses = {(*run, rate): values for run, values in losses.items() for rate in (1, 2)}
    bad_losses["E3M4", "adamw", 2] = [None]
    bad_study = study_of(bad_losses, bad_arms, "E3M4")
    bad_study.cells["steps"] = 5.0
    bad = met(bad_study)
    never = {name for name in good if good[name] == bad[name]} - {ONE_CLASS, ENOUGH}
    assert never == {TUNED}  # needs three rates: tested below
    assert all(value == "yes" for name, value in good.items() if name not in never | {ONE_CLASS, ENOUGH})


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
    for key, one in zip(keys, classes, strict=True):  # without a class, processor and torch tell
        study.timing[key] = {"machine": "a", "versions": {"torch": one}}
    assert conditions(study, compare(study))[ONE_CLASS][0] == met


@pytest.mark.parametrize(
    ("documents", "asked", "expected", "words"),
    [(470, 256, "yes", "256 sequences of 64 tokens, of 470 validation documents; there"),
     (30, 30, "yes", "30 sequences of 64 tokens, of 30 validation documents; there"),
     (29, 256, "no", "256 sequences of 64 tokens, of 29 validation documents, fewer than 30; there"),
     (470, 29, "no", "29 sequences of 64 tokens, of 470 validation documents, fewer than 30; there"),
     (4, 10**8, "no", "312 sequences of 64 tokens, of 4 validation documents, fewer than 30; there")],
)  # fmt: skip
def test_the_text_that_runs_are_compared_on_is_counted(documents: int, asked: int, expected: str, words: str) -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    made = study_of(losses_of(arms, None, ["E3M4", "E4M3"]), arms, "E3M4")
    study = replace(made, corpus={"splits": {"val": {"documents": documents, "tokens": 20_000}}})
    for cell in study.resolved.values():
        cell |= {"train": cell["train"] | {"eval_sequences": asked}, "model": {"context": 64}}
    comparison = compare(study)
    found, reason = conditions(study, comparison)[ENOUGH]
    assert found == expected and reason.startswith(words)
    visible = sorted(result.visible for result in comparison.claims.values())
    assert f"if it is {visible[0]:.3g} to {visible[-1]:.3g} nats per token or more" in reason


def test_runs_that_completed_at_no_rate_have_no_optimum_at_an_edge() -> None:
    rates = (0.5, 1, 2)
    losses = {("E3M4", "adamw", rate): noisy(3.5 + abs(math.log2(rate))) for rate in rates}
    losses |= {("E4M3", "adamw", rate): [None] * 5 for rate in rates}
    losses |= {("E2M5", "adamw", rate): noisy(3.5 - rate) for rate in rates}

    def condition(*entries: str):
        study = study_of({run: own for run, own in losses.items() if run[0] in entries}, {"adamw": ADAMW}, "E3M4")
        return conditions(study, compare(study))[TUNED]

    assert condition("E3M4")[0] == "yes"
    rates_tried = "3 learning rates for every optimizer; "
    assert condition("E3M4", "E4M3") == ("partly", f"{rates_tried}completed at no rate: E4M3 adamw")
    both = condition("E3M4", "E4M3", "E2M5")[1]
    assert both == f"{rates_tried}optimum at an edge: E2M5 adamw at 2; completed at no rate: E4M3 adamw"
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


def test_what_decay_leaves_is_given_as_a_number_for_each_arm() -> None:
    """Steps of 1 rise over the first and fall along half a cosine to 0.1: the product of 1 - decay x share, by hand."""
    arms = {"adamw": ADAMW, "stiff": STIFF | {"decay": 0.1}}
    study = study_of({("E3M4", arm): [3.0, 3.1] for arm in arms}, arms, "E3M4")
    shares = [1, *(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 9)) for k in range(1, 10))]
    kept = 100 * math.prod(1 - 0.1 * share for share in shares)
    decay = "Decay leaves the same share of the weights under every optimizer, over the run"
    found, reason = conditions(study, compare(study))[decay]
    assert found == "no" and f"stiff: {kept:.3g} % of a linear layer" in reason


def test_values_of_a_uniform_grid_need_no_control() -> None:
    """No exponent tells there, so that a spacing is one number."""
    arms = {"adamw": ADAMW, "stiff": STIFF}

    def made(*entries: str) -> Study:
        return with_formats(study_of(losses_of(arms, formats=list(entries)), arms, entries[0]))

    study = made("bf16", "E0M7", "E1M6", "E2M5", "virtual.E1M6")
    assert {entry for entry in study.formats if has_even_grid(study, entry)} == {"E0M7", "E1M6", "virtual.E1M6"}
    name = "Unquantized control (`virtual.`), the same spacing without the format"
    spared = "one for E3M4; the values of E1M6 are a uniform grid, which needs none"
    for entries, expected in ((("E3M4", "virtual.E3M4", "E1M6"), ("yes", spared)),
                              (("E3M4", "E1M6"), ("no", "none for E3M4"))):  # fmt: skip
        assert conditions(study := made(*entries), compare(study))[name] == expected
    assert met(made("E1M6"))[name] == "does not apply"


# --- an earlier run speaks for a learning rate only where it asked the same -------------------------


@pytest.fixture
def default() -> Study:
    """Return a study of the shipped params.yaml's AdamW in one format."""
    params = load_params(SHIPPED)
    arms = {ARM: params.optimizers[ARM].model_dump(mode="json")}
    found = study_of({("E4M3", ARM): [3.5] * 5}, arms, "E4M3")
    corpus = {"corpus": params.corpus, "vocab_size": params.tokenizer.vocab_size}
    cells = found.cells.assign(**SIZE)
    return replace(found, params=found.params | {"optimizers": arms}, corpus=found.corpus | corpus, cells=cells)


def tried(
    folder: Path, losses: dict[float, list[float | None]] = LOSSES, seeds: tuple[int, ...] = (10, 11),
    settings: dict[str, Any] | None = None, **columns: int,
) -> Path:  # fmt: skip
    """Write down a tuning run, ``settings`` changed in params.yaml and ``columns`` in its rows; return its study."""
    shutil.copy(SHIPPED, folder / "params.yaml")
    place = folder / "reports/study"
    (place / "results").mkdir(parents=True)
    run = {"grid": {"formats": ["E4M3"], "seeds": list(seeds), "lr_scales": list(losses)}} | (settings or {})
    question = {"question": "?", "answer": ".", "runs": {"tuning": run}}
    (place / QUESTION).write_text(json.dumps(question))
    rows = [
        {"experiment": "tuning", "format": "E4M3", "optimizer": ARM, "seed": seed, "lr_scale": rate, "val_loss": value,
         "status": "diverged" if value is None else "ok", "machine": "m", "torch": "t", "commit": "c",
         "purpose": "tune"} | SIZE | columns
        for rate, values in losses.items()
        for seed, value in zip(seeds, values, strict=True)
    ]  # fmt: skip
    pd.DataFrame(rows, columns=COLUMNS).to_csv(place / "results/runs.csv", index=False)
    pd.DataFrame(columns=AFTER).to_csv(place / "results/after_training.csv", index=False)
    return place


def tuned(study: Study, folder: Path) -> tuple[str, str]:
    return conditions(study, compare(study), load_tuning(folder, study))[TUNED]


@pytest.mark.parametrize(("losses", "highest"), [
    (LOSSES, "0.006"), ({0.5: [4.0, 4.1], 1: [3.0, 3.1], 2: [3.5, None], 4: [None, None]}, "0.012"),
], ids=["three rates", "all diverged at larger ones"])  # fmt: skip
def test_the_best_of_several_rates_on_other_seeds_is_tuned(default, tmp_path, losses, highest):
    reason = f"on seeds 10 and 11 and E4M3: adamw 0.003 of 0.0015 to {highest}"
    assert tuned(default, tried(tmp_path, losses)) == ("yes", reason)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"losses": {0.5: [3.0, 3.0], 1: [3.1, 3.1], 2: [4.0, 4.0]}}, "adamw: 0.003, and 0.0015 was better"),
        ({"losses": {1: [3.0, 3.0], 2: [4.0, 4.0]}}, "0.003, at the edge of the rates tried"),
        ({"losses": {0.5: [4.0, 4.0], 1: [3.0, None], 2: [3.9, 3.9]}}, "and 0.006 was better"),
        ({"seeds": (0, 10)}, "adamw: tuned on seeds of this grid"),
        ({"steps": 7}, "adamw: tuned with another number of steps"),
        ({"tokens": 7}, "adamw: tuned with another number of tokens"),
        ({"parameters": 7}, "adamw: tuned with another model"),
        ({"settings": {"corpus": "wikitext"}}, "adamw: tuned with another text"),
        ({"settings": {"optimizers": {ARM: {"decay": 0.1}}}}, "adamw: tuned with another decay"),
    ],
)
def test_one_that_asked_something_else_is_not(default, tmp_path, change, words):
    met, reason = tuned(default, tried(tmp_path, **change))
    assert met == "no" and words in reason


def test_an_arm_that_was_not_tuned_is_named(default, tmp_path):
    losses = {("E4M3", arm): [3.5] * 5 for arm in (ARM, "other")}
    arms = {ARM: default.params["optimizers"][ARM], "other": default.params["optimizers"][ARM] | {"momentum": 0.5}}
    both = study_of(losses, arms, "E4M3")
    cells = both.cells.assign(**SIZE)
    both = replace(both, params=both.params | {"optimizers": arms}, corpus=default.corpus, cells=cells)
    met, reason = tuned(both, tried(tmp_path))
    assert met == "partly" and reason.startswith("other: not among the optimizers tuned; on seeds 10 and 11")


def test_without_a_run_or_with_one_that_cannot_be_read_nothing_is_claimed(default, tmp_path):
    assert tuned(default, tmp_path)[0] == "no"
    place = tried(tmp_path)
    (place / QUESTION).write_text("nonsense: 1")
    assert tuned(default, place)[0] == "no"
