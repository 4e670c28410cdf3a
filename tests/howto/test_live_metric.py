"""A live metric is two places, as altgrad/training/README.md says. Oracles: the report, the initial weights."""

from __future__ import annotations

import pandas as pd
import pytest
from safetensors.numpy import load_file

KEY = "E4M3-adamw-0-1"


def test_it_is_measured_in_one_place_and_defined_in_another(followed) -> None:
    assert followed.changes["a live metric"] == {"altgrad/training/monitor.py", "altgrad/metrics/table.py"}


def test_the_command_defines_it(followed) -> None:
    definition = followed.said.split("crest [")[1].splitlines()[1]
    assert definition.endswith("over its root mean square. Flagged above 30 in inputs.")


def test_it_is_recorded_where_its_row_says_and_is_what_it_says(followed) -> None:
    run = followed.project.folder / f"data/runs/{KEY}"
    rows = pd.read_parquet(run / "monitors.parquet")
    rows = rows[rows["metric"] == "crest"]
    assert set(rows["role"]) == {"input", "weight", "grad"} and (rows["value"] >= 1).all()
    found = rows[(rows["step"] == 1) & (rows["role"] == "weight") & (rows["layer"] == "blocks.0.mlp.up")]["value"]
    w = load_file(run / "probes.safetensors")["weight/0/blocks.0.mlp.up"].astype("float64")
    assert found.item() == pytest.approx(abs(w).max() / (w**2).mean() ** 0.5, rel=1e-6)
