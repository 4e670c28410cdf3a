"""A setting is declared once and read once, as altgrad/config/README.md says. Oracles: a cell's file, its gradients."""

from __future__ import annotations

import json

import pandas as pd

KEY = "E4M3-adamw-0-1"


def test_it_is_declared_in_one_place_and_read_in_one(followed) -> None:
    assert followed.changes["a setting"] == {"altgrad/config/schema.py", "altgrad/training/trainer.py"}


def test_the_command_made_its_row_in_the_reference(followed) -> None:
    page = (followed.project.folder / "altgrad/config/settings/train.md").read_text(encoding="utf-8")
    assert "| `centre` | `true` or `false` | `false` | take its mean over the inputs from" in page


def test_it_is_in_every_cell(followed) -> None:
    cells = [json.loads(path.read_text()) for path in followed.project.folder.glob("data/grid/*-*.json")]
    assert len(cells) > 3 and all(cell["train"]["centre"] is True for cell in cells)


def test_it_acts(followed) -> None:
    """The rows of a centred matrix add up to nothing, and so does the matrix."""
    rows = pd.read_parquet(followed.project.folder / f"data/runs/{KEY}/monitors.parquet")
    rows = rows[rows["role"] == "weight_grad"].pivot_table(index=["step", "layer"], columns="metric", values="value")
    assert len(rows) > 4 and (rows["mean"].abs() <= 1e-6 * rows["linf"]).all() and (rows["linf"] > 0).all()
