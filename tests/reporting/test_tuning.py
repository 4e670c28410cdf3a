"""An earlier run speaks for a learning rate only where it asked the same. Oracle: losses that are made for the test."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML

from altgrad.config import load_params
from altgrad.reporting.compare import compare
from altgrad.reporting.fairness import conditions
from altgrad.reporting.load import Study
from altgrad.reporting.tuning import load_tuning
from tests.reporting.made_losses import study_of

SHIPPED = Path(__file__).parents[2] / "params.yaml"
NAME = "Learning rate tuned per arm, optimum bracketed"
ARM = "adamw"
LOSSES = {0.5: [4.0, 4.1], 1: [3.0, 3.1], 2: [3.5, 3.2]}


@pytest.fixture
def study() -> Study:
    """Return a study of the shipped params.yaml's AdamW in one format."""
    params = load_params(SHIPPED)
    arms = {ARM: params.optimizers[ARM].model_dump(mode="json")}
    found = study_of({("E4M3", ARM): [3.5] * 5}, arms, "E4M3")
    selected = {
        "model": {params.model: params.models[params.model].model_dump(mode="json")},
        "train": params.train.model_dump(mode="json"), "optimizers": arms,
    }  # fmt: skip
    corpus = {"corpus": params.corpus, "vocab_size": params.tokenizer.vocab_size}
    return replace(found, params=found.params | selected, corpus=found.corpus | corpus)


def tried(folder: Path, losses: dict[float, list[float | None]] = LOSSES, **settings: object) -> Path:
    """Write down a tuning run on seeds 10 and 11, ``settings`` of its params.yaml changed; return ``folder``."""
    shutil.copy(SHIPPED, folder / "params.yaml")
    yaml = YAML()
    params = yaml.load(SHIPPED)
    params["grid"] |= {"seeds": [10, 11], "formats": ["E4M3"], "baseline": "E4M3", "lr_scales": list(losses)}
    for path, value in settings.items():
        section = params
        *sections, name = path.split("__")
        for part in sections:
            section = section[part]
        section[name] = value
    with open(folder / "params.yaml", "w") as file:
        yaml.dump(params, file)
    rows = [
        ("E4M3", ARM, 10 + i, rate, value)
        for rate, values in losses.items()
        for i, value in enumerate(values)
        if value is not None  # the pipeline keeps no row of a run that diverged
    ]
    pd.DataFrame(rows, columns=["format", "optimizer", "seed", "lr_scale", "val_loss"]).to_csv(
        folder / "results.csv", index=False
    )
    return folder


def condition(study: Study, folder: Path) -> tuple[str, str]:
    found = {c.name: c for c in conditions(study, compare(study), None, load_tuning(folder, study))}
    return found[NAME].met, found[NAME].reason


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
        ({"grid__seeds": [0, 10]}, "adamw: tuned on seeds of this grid"),
        ({"train__steps": 7}, "adamw: tuned with another train"),
        ({"model": "nano"}, "adamw: tuned with another model"),
        ({"corpus": "wikitext"}, "adamw: tuned with another text"),
        ({"optimizers__adamw__decay": 0.1}, "adamw: tuned with another decay"),
    ],
)
def test_one_that_asked_something_else_is_not(study, tmp_path, change, words):
    met, reason = condition(study, tried(tmp_path, **change))
    assert met == "no" and words in reason


def test_an_arm_that_was_not_tuned_is_named(study, tmp_path):
    losses = {("E4M3", arm): [3.5] * 5 for arm in (ARM, "other")}
    arms = {ARM: study.params["optimizers"][ARM], "other": study.params["optimizers"][ARM] | {"momentum": 0.5}}
    both = study_of(losses, arms, "E4M3")
    both = replace(both, params=study.params | {"optimizers": arms, "grid": both.params["grid"]}, corpus=study.corpus)
    met, reason = condition(both, tried(tmp_path))
    assert met == "partly" and reason.startswith("other: not among the arms tuned; on seeds 10 and 11")


def test_without_a_run_or_with_one_of_other_settings_nothing_is_claimed(study, tmp_path):
    assert condition(study, tmp_path)[0] == "no"
    tried(tmp_path)
    (tmp_path / "params.yaml").write_text("nonsense: 1")
    assert condition(study, tmp_path)[0] == "no"
