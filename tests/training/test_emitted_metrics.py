"""Every metric that a run records has a row in the table, and every row that says ``live`` is recorded.

Oracle: the files of a run that is trained here.
"""

from __future__ import annotations

import pandas as pd

from altgrad.common.files import read_json
from altgrad.config import Cell
from altgrad.metrics import METRICS
from altgrad.training import train_cell
from altgrad.training.outcome import SATURATION
from tests.training.conftest import make_cell


def in_recipe(cell: Cell, rules: dict[str, object]) -> Cell:
    return Cell.model_validate(cell.model_dump(mode="json") | {"rules": [rules]})


def test_what_monitors_record_is_what_the_table_says(tokens, tmp_path) -> None:
    block = {"format": "E4M3", "granularity": "block", "block": 8, "scale": "E8M0"}
    rules = {"layers": "*", "weight": block, "input": block, "grad": block}
    cells = {"out": make_cell(), "blocks": in_recipe(make_cell(), rules)}
    for name, cell in cells.items():
        train_cell(cell, tokens, tmp_path / name, tmp_path / f"{name}-root")
    rows = pd.concat([pd.read_parquet(tmp_path / name / "monitors.parquet") for name in cells])
    names = rows["metric"].str.replace(r"_2\^-?\d+$", "", regex=True)  # rungs by binade
    recorded = set(zip(names, rows["role"], strict=True))
    assert recorded == {(metric.name, role) for metric in METRICS.values() for role in metric.live}
    assert 0 <= read_json(tmp_path / "out/metrics.json")["clipped_frac"] <= 1  # the one that training has of a run


def test_saturation_begins_where_overflow_is_flagged() -> None:
    """Training cannot read the table: a reworded definition would train every cell anew."""
    assert METRICS["overflow_frac"].limit.value == SATURATION
