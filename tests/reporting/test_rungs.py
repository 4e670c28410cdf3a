"""Whole rungs in several formats: planted gains are found by each test, and by no other."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas as pd
import pytest

from altgrad.config import UserError
from altgrad.reporting.decide import decide
from tests.reporting.made_parts import write_part

STEPS = (-1.0, 2.0, 0.5, -2.5, 1.0)  # of mean zero, so that what is planted as nothing gains nothing by chance
CHANCE = {"E4M3": 0.0, "E5M2": -0.02, "E1M6": 0.01}  # what adamw_sr gains over adamw
RUNG = {"E4M3": 0.05, "E5M2": 0.0, "E1M6": -0.05}  # what rungs gain over adamw_sr
OWN = {"E4M3": 0.01, "E5M2": -0.01, "E1M6": 0.0}  # what of that is the format's own


def part(folder: Path, entry: str, arms: dict[str, float]) -> None:
    """Write losses that differ from seed to seed by far more than arms do, and arms a little from seed to seed."""
    rows = [
        (entry, arm, seed, 3 + 0.3 * seed - gain + 1e-3 * number * STEPS[seed])
        for (number, (arm, gain)), seed in itertools.product(enumerate(arms.items()), range(5))
    ]
    write_part(folder, pd.DataFrame(rows, columns=["format", "optimizer", "seed", "val_loss"]))


def formats(folder: Path, twins: bool) -> Path:
    for fmt, chance in CHANCE.items():
        part(folder / fmt, fmt, {"adamw": 0.0, "adamw_sr": chance, "rung": chance + RUNG[fmt]})
        if twins:  # at a level of their own, which the own part has nothing of
            part(folder / f"virtual.{fmt}", f"virtual.{fmt}", {"adamw_sr": 0.7, "rung": 0.7 + RUNG[fmt] - OWN[fmt]})
    return folder


def row(text: str, fmt: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"| **{fmt}**")).strip("| ").split(" | ")


def stated(cell: str) -> float:
    return float(cell.split(" [")[0].replace("−", "-"))


def test_each_format_is_held_against_adamw_without_and_with_masters_and_its_twin(tmp_path):
    text = decide(formats(tmp_path / "rungs", twins=True))
    assert "**A3.** `rung` ends lower than `adamw_sr`: E4M3; higher: E1M6; not told apart: E5M2." in text
    assert "**A5.** `adamw_sr` ends lower than `adamw`: E1M6; higher: E5M2; not told apart: E4M3." in text
    assert "**A4.** The format's own part of what `rung` gains is above zero in E4M3; below in E5M2; not " in text
    for fmt in RUNG:
        gain, _, own, _, chance, _ = row(text, fmt)[1:]
        assert [stated(cell) for cell in (gain, own, chance)] == pytest.approx(
            [RUNG[fmt], OWN[fmt], CHANCE[fmt]], abs=1e-9
        )
    assert "over 5 seeds, each by itself; p by Holm over the 3 formats" in text


def test_without_twins_nothing_is_said_of_an_own_part(tmp_path):
    text = decide(formats(tmp_path / "ladder-nano-rungs", twins=False))
    assert "**L33.** `rung` ends lower than `adamw_sr`: E4M3;" in text and "**L34.** `adamw_sr` ends" in text
    assert "own part" not in text.lower() and len(row(text, "E4M3")) == 5


def test_arms_without_masters_alone_are_held_against_each_other_and_their_twin(tmp_path):
    folder = tmp_path / "ladder-nano-rungs-own"
    part(folder / "E1M6", "E1M6", {"adamw_sr": 0.0, "rung": 0.05})
    part(folder / "virtual.E1M6", "virtual.E1M6", {"adamw_sr": -0.4, "rung": -0.37})
    text = decide(folder)
    assert "**L52.** `rung` ends lower than `adamw_sr`: E1M6;" in text and "masters" not in text
    assert "**L53.** The format's own part of what `rung` gains is above zero in E1M6;" in text
    assert [stated(cell) for cell in row(text, "E1M6")[1:4:2]] == pytest.approx([0.05, 0.02], abs=1e-9)
    assert len(row(text, "E1M6")) == 5


def test_a_folder_without_formats_is_refused(tmp_path):
    (tmp_path / "rungs").mkdir()
    with pytest.raises(UserError, match="no format in it; make study PART=rungs makes all of them"):
        decide(tmp_path / "rungs")
