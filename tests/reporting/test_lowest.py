"""What ends lowest. Oracle: losses in which that is written down; chance, counted over many made studies."""

from __future__ import annotations

import numpy as np

from altgrad.reporting.compare import compare
from altgrad.reporting.load import Study
from altgrad.reporting.lowest import lowest, lowest_blocks
from tests.reporting.made_losses import study_of

ADAMW = {"base": "adamw", "lr": 1e-3}
ARMS = {"adamw": ADAMW, "stiff": ADAMW | {"stiffness": "ulp"}}
SEEDS = 5


def made(levels: dict[tuple[str, ...], float], noise: float = 1e-3, seed: int = 0, seeds: int = SEEDS) -> Study:
    """Return a study with these mean losses; seeds differ by a tenth, alike in all, and by ``noise`` each."""
    random = np.random.default_rng(seed)
    losses = {
        run: [3 + 0.1 * s + level + noise * random.normal() for s in range(seeds)] for run, level in levels.items()
    }
    return study_of(losses, {run[1]: ARMS[run[1]] for run in levels}, "E4M3")


def said(study: Study) -> str:
    (block,) = lowest_blocks(study, compare(study))
    return block.text


LEVELS = {("E4M3", "adamw"): 0.1, ("E4M3", "stiff"): 0.0, ("E3M4", "adamw"): 0.1, ("E3M4", "stiff"): 0.0}


def test_the_lowest_and_its_equals_are_named_and_the_higher_ones_are_not():
    study = made(LEVELS)
    found = lowest(study, compare(study))
    assert {found.run[:2], *(run[:2] for run in found.close)} == {("E4M3", "stiff"), ("E3M4", "stiff")}
    assert "The other 2 are higher (6 pairs of all, adjusted together" in said(study)


def test_one_that_is_lower_than_all_is_said_to_be():
    assert "of `stiff` in **E3M4**; all 3 others are told apart from it (" in said(
        made(LEVELS | {("E3M4", "stiff"): -0.1})
    )


def test_of_two_and_three_the_other_one_is_named_in_the_singular():
    two = {run: LEVELS[run] for run in (("E4M3", "adamw"), ("E4M3", "stiff"))}
    assert "; the other one is told apart from it (1 pair of all," in said(made(two))
    assert ", and the other one is not told apart from it." in said(made(two, seeds=4))
    three = {("E4M3", "adamw"): 0.0, ("E3M4", "adamw"): 0.0, ("E5M2", "adamw"): 0.1}
    assert ". The other one is higher (3 pairs of all," in said(made(three))


def test_one_that_lost_its_worst_seed_is_not_lower_for_that():
    study = made({("E4M3", "adamw"): 0.0, ("E3M4", "adamw"): 0.02}, seeds=6)
    worst = (study.cells["format"] == "E3M4") & (study.cells["seed"] == 5)
    study.cells.loc[worst, "status"] = "diverged"
    means = study.cells[~worst].groupby("format")["val_loss"].mean()
    assert means["E3M4"] < means["E4M3"], "as it would seem"
    assert "of `adamw` in **E4M3**; the other one is told apart from it" in said(study)


def test_few_seeds_or_rates_chosen_here_tell_nothing_apart():
    assert "none of the 3 others is told apart from it." in said(made(LEVELS, seeds=4))
    rates = {(*run, rate): level + 0.01 * rate for run, level in LEVELS.items() for rate in (1, 2)}
    assert "as rates were chosen on these seeds" in said(made(rates))


def test_among_equals_the_lowest_is_told_apart_from_another_at_most_one_time_in_twenty():
    """Everything equal: Holm over all pairs, though the lowest of them was picked."""
    studies = 200
    wrong = 0
    for seed in range(studies):
        study = made(dict.fromkeys(LEVELS, 0.0), noise=0.01, seed=seed)
        found = lowest(study, compare(study))
        wrong += len(found.close) < found.others
    assert wrong <= 0.05 * studies + 3 * (0.05 * 0.95 * studies) ** 0.5


def test_what_is_not_quantized_or_alone_is_not_in_question():
    losses = {("bf16", "adamw"): [2.0] * 5, ("E4M3", "adamw"): [3.0] * 5, ("virtual.E4M3", "adamw"): [1.0] * 5}
    study = study_of(losses, {"adamw": ADAMW}, "bf16")
    assert lowest_blocks(study, compare(study)) == []
