"""What an arm gains, in words, where runs diverged. Oracle: losses in which that is written down."""

from __future__ import annotations

import re

import numpy as np
import pytest

from altgrad.reporting.compare import compare
from altgrad.reporting.gain_sentences import gain_blocks
from tests.reporting.made_losses import ADAMW, STIFF, study_of

NULL = ADAMW | {"stiffness": "permuted"}
SEEDS = 7
Losses = dict[tuple[str, str], list[float | None]]


def losses_of(gains: dict[tuple[str, str], float], arms: dict[str, dict]) -> Losses:
    """Return losses that seeds have in common but for a thousandth, lower by what is gained."""
    random = np.random.default_rng(3)
    return {
        (entry, arm): [3 + 0.1 * seed - gains.get((entry, arm), 0.0) + 1e-3 * random.normal() for seed in range(SEEDS)]
        for entry in dict.fromkeys(entry for entry, _ in gains)
        for arm in arms
    }


def said(losses: Losses, arms: dict[str, dict]) -> str:
    study = study_of(losses, arms, next(iter(losses))[0])
    return " ".join(str(block) for block in gain_blocks(study, compare(study)))


def test_runs_that_diverged_and_the_seeds_that_are_left_are_counted() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of({("E3M4", "stiff"): 0.1, ("E4M3", "stiff"): 0.05, ("E5M2", "stiff"): 0.0}, arms)
    losses["E4M3", "stiff"][2:4] = [None, None]
    losses["E5M2", "stiff"] = [None] * SEEDS
    text = said(losses, arms)
    assert "Diverged: **E4M3** (2 of 7 seeds), **E5M2** (7 of 7 seeds)." in text
    assert re.search(r"\*\*E4M3\*\* \+0\.0[45]\d\d from 5 of 7 seeds", text)
    assert text.count("of 7 seeds") == 3, "E3M4 has them all, which goes without saying"


def test_the_headline_and_its_rivals_do_not_contradict_each_other() -> None:
    """C gains most on the one seed it has left; the firm gains are those of A and B."""
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of({("E3M4", "stiff"): 0.1, ("E4M3", "stiff"): 0.05, ("E5M2", "stiff"): 0.3}, arms)
    losses["E5M2", "stiff"][1:] = [None] * (SEEDS - 1)
    text = said(losses, arms)
    assert "lowers the loss most in **E3M4**" in text and "not told apart from E3M4" not in text
    assert "**E3M4 gains most.**" in text


@pytest.mark.parametrize(
    ("null", "lost", "words"),
    [
        (0.02, 0, "beats `null`"),
        (0.1, 0, "not told apart from `null`"),
        (0.2, 0, "is beaten by `null`"),
        (0.02, SEEDS - 1, "not judged against `null`"),
    ],
)
def test_a_control_is_beaten_beats_is_not_told_apart_or_not_judged(null, lost, words) -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF, "null": NULL}
    losses = losses_of({("E3M4", "stiff"): 0.1, ("E3M4", "null"): null}, arms)
    if null == 0.1:
        losses["E3M4", "null"] = [loss + 0.004 * (-1) ** seed for seed, loss in enumerate(losses["E3M4", "stiff"])]
    losses["E3M4", "null"][:lost] = [None] * lost
    assert f"Controls: {words} in E3M4." in said(losses, arms)


def test_a_twin_that_diverged_is_not_one_that_is_wanting() -> None:
    arms = {"adamw": ADAMW, "stiff": STIFF}
    losses = losses_of({("E3M4", "stiff"): 0.1, ("virtual.E3M4", "stiff"): 0.1}, arms)
    losses["virtual.E3M4", "adamw"] = [None] * SEEDS
    assert "is open**, since no virtual twin completed in the same arms." in said(losses, arms)
    alone = {run: own for run, own in losses.items() if run[0] == "E3M4"}
    assert "is open**, for want of virtual twins." in said(alone, arms)
