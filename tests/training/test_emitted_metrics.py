"""Every metric that a run records has a row in the table, and every row that says ``live`` is recorded.

Oracle: the files of a run that is trained here.
"""

from __future__ import annotations

import pandas as pd

from altgrad.config.files import read_json
from altgrad.metrics import METRICS
from altgrad.training import train_cell
from altgrad.training.outcome import SATURATION
from tests.training.conftest import make_cell


def test_what_monitors_record_is_what_the_table_says(tokens, tmp_path) -> None:
    train_cell(make_cell(), tokens, tmp_path / "out", tmp_path)
    rows = pd.read_parquet(tmp_path / "out/monitors.parquet")
    names = rows["metric"].str.replace(r"_2\^-?\d+$", "", regex=True)  # rungs by binade
    recorded = set(zip(names, rows["role"], strict=True))
    assert recorded == {(metric.name, role) for metric in METRICS.values() for role in metric.live}
    assert 0 <= read_json(tmp_path / "out/metrics.json")["clipped_frac"] <= 1  # the one that training has of a run


def test_saturation_begins_where_overflow_is_flagged() -> None:
    """Training cannot read the table: a reworded definition would train every cell anew."""
    assert METRICS["overflow_frac"].limit.value == SATURATION
