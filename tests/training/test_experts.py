"""A run whose experts mostly have no token: more experts than tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from altgrad.config import Cell
from tests.training.conftest import STATEFUL, diagnosed, make_cell, resumed, trained


def cell_of(**recipe: Any) -> Cell:
    """Return a cell of 8 tokens a micro-batch, each for one of 12 experts."""
    cell = make_cell(batch=1, **recipe)
    model = cell.model.model_copy(update={"experts": 12, "active": 1, "context": 8, "mlp": "swiglu"})
    return cell.model_copy(update={"model": model})


@pytest.mark.parametrize("recipe", [{}, STATEFUL], ids=["dynamic", "stateful"])
def test_experts_without_tokens_stop_no_run(
    recipe: dict[str, str], tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(**recipe)
    (tmp_path / "whole").mkdir()
    whole = trained(cell, tokens, tmp_path / "whole")
    monitors = pd.read_parquet(tmp_path / "whole" / "out" / "monitors.parquet")
    assert {f"blocks.0.mlp.experts.{e}.gate" for e in range(12)} <= set(monitors["layer"])
    assert resumed(cell, tokens, tmp_path, monkeypatch) == whole
    assert diagnosed(cell, tmp_path / "out", tmp_path, tokens)[0]["status"] == "ok"
