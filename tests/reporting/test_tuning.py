"""An earlier run speaks for a learning rate only where it asked the same. Oracle: losses that are made for the test."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from altgrad.config import load_params
from altgrad.reporting.compare import compare
from altgrad.reporting.fairness import conditions
from altgrad.reporting.load import Study
from altgrad.reporting.study.runs import AFTER, COLUMNS
from altgrad.reporting.tuning import QUESTION, load_tuning
from tests.reporting.made_losses import study_of

SHIPPED = Path(__file__).parents[2] / "params.yaml"
NAME = "Learning rate tuned per optimizer, optimum bracketed"
ARM = "adamw"
LOSSES = {0.5: [4.0, 4.1], 1: [3.0, 3.1], 2: [3.5, 3.2]}
SIZE = {"parameters": 168256, "steps": 200, "tokens": 204800}


@pytest.fixture
def study() -> Study:
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


def condition(study: Study, folder: Path) -> tuple[str, str]:
    return conditions(study, compare(study), load_tuning(folder, study))[NAME]


def test_the_best_of_three_rates_on_other_seeds_is_tuned(study, tmp_path):
    met, reason = condition(study, tried(tmp_path))
    assert met == "yes"
    assert reason == "on seeds 10 and 11 and E4M3: adamw 0.003 of 0.0015 to 0.006"


def test_larger_rates_at_which_all_diverged_were_tried_all_the_same(study, tmp_path):
    losses = {0.5: [4.0, 4.1], 1: [3.0, 3.1], 2: [3.5, None], 4: [None, None]}
    met, reason = condition(study, tried(tmp_path, losses))
    assert met == "yes" and reason.endswith("adamw 0.003 of 0.0015 to 0.012")


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
def test_one_that_asked_something_else_is_not(study, tmp_path, change, words):
    met, reason = condition(study, tried(tmp_path, **change))
    assert met == "no" and words in reason


def test_an_arm_that_was_not_tuned_is_named(study, tmp_path):
    losses = {("E4M3", arm): [3.5] * 5 for arm in (ARM, "other")}
    arms = {ARM: study.params["optimizers"][ARM], "other": study.params["optimizers"][ARM] | {"momentum": 0.5}}
    both = study_of(losses, arms, "E4M3")
    cells = both.cells.assign(**SIZE)
    both = replace(both, params=both.params | {"optimizers": arms}, corpus=study.corpus, cells=cells)
    met, reason = condition(both, tried(tmp_path))
    assert met == "partly" and reason.startswith("other: not among the optimizers tuned; on seeds 10 and 11")


def test_without_a_run_or_with_one_that_cannot_be_read_nothing_is_claimed(study, tmp_path):
    assert condition(study, tmp_path)[0] == "no"
    place = tried(tmp_path)
    (place / QUESTION).write_text("nonsense: 1")
    assert condition(study, place)[0] == "no"
