"""The main number by format, and of an arm without masters in long runs, against planted effects."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from altgrad.reporting.decide import decide
from tests.reporting.made_parts import write_part

NOISE = (-1.0, 2.0, 0.5, -1.5)  # of mean zero, in ten-thousandths, so that estimates are the planted ones


def part(folder: Path, arm: str, gains: dict[str, float]) -> Path:
    """Write a part in which ``arm`` gains so much over AdamW by format, and seeds differ by more than arms do."""
    rows = [
        (entry, name, seed, 3 + 0.3 * seed - (gain + 1e-4 * NOISE[(seed + place + place // 4) % 4]) * (name == arm))
        for (place, (entry, gain)), name, seed in itertools.product(
            enumerate(gains.items()), ("adamw", arm), range(4)
        )
    ]  # fmt: skip
    return write_part(folder, pd.DataFrame(rows, columns=["format", "optimizer", "seed", "val_loss"]))


def row(text: str, label: str) -> list[float]:
    """Return the estimates and p values of the table's row that begins with ``label``."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    cells = [cell.strip().split(" [")[0].replace("−", "-") for cell in line.split("|")[2:-1]]
    return [0.0 if cell.startswith("&lt;") else float(cell) for cell in cells]


def test_gains_and_own_parts_are_told_apart_format_by_format(tmp_path):
    gains = {"E2M5": 0.02, "E3M4": 0.03, "E6M1": -0.01, "E7M0": 0.0}
    twins = {"virtual.E2M5": 0.02, "virtual.E3M4": 0.01, "virtual.E6M1": 0.01, "virtual.E7M0": 0.0}
    text = decide(part(tmp_path / "splits", "stiff_matched", gains | twins))
    own = "**H6.** The format's own part of what `stiff_matched` gains is "
    assert own + "above zero in E3M4; below in E6M1; not told apart in E2M5, E7M0." in text
    told = "**H7.** `stiff_matched` ends lower than `adamw`: E2M5, E3M4; higher: E6M1; not told apart: E7M0."
    assert told in text
    for fmt, gain in gains.items():
        shown = row(text, f"**{fmt}**")
        assert shown[0] == pytest.approx(gain, abs=1e-9) and shown[2] == pytest.approx(
            gain - twins[f"virtual.{fmt}"], abs=1e-9
        )


def test_p_values_are_by_holm_over_the_formats_of_a_column(tmp_path):
    gains = {"E2M5": 1e-4, "E3M4": 2e-4, "virtual.E2M5": -1e-4, "virtual.E3M4": 1e-4}
    text = decide(part(tmp_path / "splits", "stiff_matched", gains))
    by_seed = {
        entry: np.array([gain + 1e-4 * NOISE[(seed + place) % 4] for seed in range(4)])
        for place, (entry, gain) in enumerate(gains.items())
    }
    own = {fmt: by_seed[fmt] - by_seed[f"virtual.{fmt}"] for fmt in ("E2M5", "E3M4")}
    for column, differences in ((1, by_seed), (3, own)):
        single = {fmt: stats.ttest_1samp(differences[fmt], 0).pvalue for fmt in own}
        low, high = sorted(single, key=single.get)
        adjusted = {low: min(1.0, 2 * single[low]), high: max(2 * single[low], single[high])}
        assert {fmt: row(text, f"**{fmt}**")[column] for fmt in own} == pytest.approx(adjusted, rel=0.06)


@pytest.mark.parametrize(
    ("in_format", "in_twin", "arm", "own"),
    [
        (-0.02, 0.0, "higher: `adamw_sr`", "below zero"),
        (-0.02, -0.02, "higher: `adamw_sr`", "not told apart from zero"),
        (0.0, 0.0, "not told apart: `adamw_sr`", "not told apart from zero"),
    ],
)
def test_what_masters_are_worth_is_the_formats_or_not(in_format, in_twin, arm, own, tmp_path):
    gains = {"E3M4": in_format, "virtual.E3M4": in_twin}
    text = decide(part(tmp_path / "length-3200-masters", "adamw_sr", gains))
    assert "**L60.** In E3M4, lower than `adamw`: " in text and arm in text
    line = next(line for line in text.splitlines() if line.startswith("**L61.**"))
    assert "of what `adamw_sr` gains: " in line and line.endswith(f", {own}.")
