"""Planted costs of pruning and gains by width are found by each test, and by no other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from altgrad.config import UserError
from altgrad.reporting.decide import decide
from tests.reporting.made_parts import write_part

STEPS = (-1.0, 2.0, 0.5, -2.5, 1.0)  # of mean zero, so that what is planted as nothing is nothing
LOSS = {"adamw": 2.5, "stiff_matched": 2.57, "permuted_matched": 2.55, "mean_matched": 2.54}
COST = {"adamw": 0.3, "stiff_matched": 0.1, "permuted_matched": 0.1, "mean_matched": 0.05}  # of half of the weights


def part(folder: Path, losses: Mapping[str, float], width: int = 64) -> Path:
    rows = [
        ("E3M4", arm, seed, loss + 0.1 * seed + width / 64e3 * number * STEPS[seed])
        for (number, (arm, loss)), seed in itertools.product(enumerate(losses.items()), range(5))
    ]
    results = pd.DataFrame(rows, columns=["format", "optimizer", "seed", "val_loss"])
    return write_part(folder, results, model="pico", models={"pico": {"width": width}})


def stated(text: str, after: str) -> float:
    return float(text[text.index(after) + len(after) :].split(" [")[0].replace("−", "-"))


def test_half_of_the_weights_is_worth_less_or_more_to_an_arm_than_to_another(tmp_path):
    folder = part(tmp_path / "length-3200-pruned", LOSS)
    rows = [
        (arm, seed, share, LOSS[arm] + 0.1 * seed + cost, cost)
        for (number, arm), seed, share in itertools.product(enumerate(LOSS), range(5), (0.0, 0.3, 0.5))
        for cost in [(0 if not share else 9.0 if share == 0.3 else COST[arm] + 1e-3 * number * STEPS[seed])]
    ]
    pd.DataFrame(rows, columns=["optimizer", "seed", "share", "after", "cost"]).to_csv(
        folder / "pruned.csv", index=False
    )
    text = decide(folder)
    worth = (
        "less to `stiff_matched` than to: `adamw`; more than to: `mean_matched`; not told apart: `permuted_matched`."
    )
    assert f"**L43.** The smaller half of its weights is worth {worth}" in text
    assert stated(text, "gains over `adamw` without that half: ") == pytest.approx(0.3 - 0.1 - 0.07, abs=1e-9)
    row = next(line for line in text.splitlines() if line.startswith("| `adamw`")).strip("| ").split(" | ")
    assert row[1] == "2.7000" and stated(row[3], "") == pytest.approx(0.3)
    (folder / "pruned.csv").unlink()
    with pytest.raises(UserError, match="no pruned.csv; make study PART=length-3200-pruned makes it"):
        decide(folder)


@pytest.mark.parametrize(
    ("narrow", "wide", "told", "verdict"),
    [
        (0.09, 0.03, "none; higher: 32, 128", "less is lost, or more gained, in the wider"),
        (0.03, 0.09, "none; higher: 32, 128", "more is lost, or less gained, in the wider"),
        (-0.09, -0.03, "32, 128; higher: none", "more is lost, or less gained, in the wider"),
        (0.0, -0.05, "128; higher: none; not told apart: 32", "less is lost, or more gained, in the wider"),
        (0.05, 0.05, "none; higher: 32, 128", "not told apart."),
    ],
)
def test_the_wider_is_held_against_the_narrower(narrow, wide, told, verdict, tmp_path):
    folder = tmp_path / "length-3200-widths"
    part(folder / "wide", {"adamw": 1.0, "stiff_matched": 1 + wide}, 128)  # at a level of its own
    with pytest.raises(UserError, match="fewer than two widths"):
        decide(folder)
    part(folder / "narrow", {"adamw": 3.0, "stiff_matched": 3 + narrow}, 32)
    text = decide(folder)
    assert f"**L41.** `stiff_matched` ends lower than `adamw`, by width: {told}" in text
    assert stated(text, "minus what it gains at 32: ") == pytest.approx(narrow - wide, abs=1e-9)
    assert verdict in text[text.index("**L42.**") :].split("\n")[0]
