"""Formats after training beside formats trained so. Oracles: ranges by hand; planted differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from altgrad.reporting.after_training import AS_TRAINED, load_spreads, sentence, spreads
from altgrad.reporting.load import Study
from tests.reporting.made_losses import ADAMW, study_of

COLUMNS = ["cell", "format", "after", "trained_so"]
SEEDS = range(4)


def study() -> Study:
    losses = {(entry, "adamw"): [3.0 + 0.1 * seed + cost for seed in SEEDS]
              for entry, cost in (("bf16", 0.0), ("E4M3", 0.01), ("E5M2", 0.03))}  # fmt: skip
    return study_of(losses, {"adamw": ADAMW})


def kept(folder: Path, shift: float = 0.0) -> Path:
    """Write a table of the study's bf16 models, whose losses are ``shift`` from theirs."""
    rows = [
        (f"bf16-adamw-{seed}-1", name, 3.0 + 0.1 * seed + cost + shift, np.nan)
        for seed in SEEDS
        for name, cost in ((AS_TRAINED, 0.0), ("E4M3", 0.02), ("E5M2", 0.12 + 0.001 * seed), ("E7M0", 0.9))
    ]
    pd.DataFrame(rows, columns=COLUMNS).to_csv(folder / "ptq.csv", index=False)
    return folder / "ptq.csv"


def test_the_spread_is_over_formats_that_every_model_has_both_losses_of() -> None:
    rows = [("a", "E4M3", 1.0, 1.25), ("a", "E5M2", 3.0, 1.5), ("a", "E7M0", 9.0, np.nan), ("a", "E2M5", 0.0, 0.0),
            ("b", "E4M3", 1.5, 1.0), ("b", "E5M2", 1.0, 2.0)]  # fmt: skip
    found = spreads(pd.DataFrame(rows, columns=COLUMNS))
    assert found.formats == ("E4M3", "E5M2")
    assert (found.after.tolist(), found.trained.tolist()) == ([2.0, 0.5], [0.25, 1.0])
    assert spreads(pd.DataFrame(rows[:1], columns=COLUMNS)) is None


def test_a_kept_table_is_set_beside_the_studys_own_cells(tmp_path: Path) -> None:
    found = load_spreads(kept(tmp_path), study())
    assert found.formats == ("E4M3", "E5M2")
    assert found.after == pytest.approx([0.1 + 0.001 * seed for seed in SEEDS])
    assert found.trained == pytest.approx([0.02] * 4)
    assert sentence(found).endswith("less when trained so.")


def test_a_table_of_other_models_says_nothing(tmp_path: Path) -> None:
    assert load_spreads(kept(tmp_path, shift=0.01), study()) is None
    assert load_spreads(tmp_path / "absent.csv", study()) is None


@pytest.mark.parametrize(
    ("more", "verdict"), [(0.1, "less when"), (-0.1, "more when"), (0.0, "the two are not told apart")]
)
def test_the_verdict_is_the_intervals(more: float, verdict: str) -> None:
    random = np.random.default_rng(1)
    rows = [(seed, name, 3 + cost * (0.2 + more), 3 + cost * 0.2 + 0.002 * random.standard_normal())
            for seed in range(6) for name, cost in (("E4M3", 0), ("E5M2", 1))]  # fmt: skip
    found = spreads(pd.DataFrame(rows, columns=COLUMNS))
    assert verdict in sentence(found)
    one = spreads(pd.DataFrame(rows[:2], columns=COLUMNS))
    assert "[" not in sentence(one), "one model has no interval"
