"""A metric of the diagnosis is one file, as altgrad/diagnostics/README.md says. Oracles: the report, a sum."""

from __future__ import annotations

import pandas as pd
import pytest
from safetensors.numpy import load_file

from altgrad.diagnostics import ANALYSES, diagnose
from altgrad.diagnostics.analysis import Analysis
from altgrad.diagnostics.diagnose import Row
from altgrad.metrics import Limit, Metric
from tests.howto.conftest import Sources, blocks

KEY = "E4M3-adamw-0-1"


def source() -> str:
    (found,) = blocks("diagnostics/README.md", "python", "How to add a metric")
    return found


def test_it_is_one_file_and_the_report_shows_it_and_the_command_defines_it(followed) -> None:
    assert followed.changes["a metric"] == {"altgrad/diagnostics/cancellation.py"}
    assert "| cancellation |" in followed.report
    definition = followed.said.split("cancellation [ratio]\n")[1].splitlines()[0]
    assert "near 0 where positive and negative weights cancel" in definition and "Flagged above 0.9." in definition


def test_it_measures_the_weights(followed) -> None:
    data = followed.project.folder / "data"
    rows = pd.read_parquet(data / f"diag/{KEY}.parquet")
    found = rows[(rows["metric"] == "cancellation") & (rows["layer"] == "blocks.0.mlp.up")].iloc[-1]["value"]
    w = load_file(data / f"runs/{KEY}/model.safetensors")["blocks.0.mlp.up.weight"].astype("float64")
    assert found == pytest.approx(abs(w.sum()) / abs(w).sum(), rel=1e-9)


def test_its_limit_flags_layers(monkeypatch) -> None:
    names: dict[str, object] = {}
    exec(source(), names)
    (own,) = names["ANALYSES"]
    monkeypatch.setattr(diagnose, "ANALYSES", (*ANALYSES, own))
    rows = [Row(layer, "weight", 3, "cancellation", None, value) for layer, value in (("a", 0.9), ("b", 0.91))]
    flags = [{"layer": "b", "metric": "cancellation", "value": 0.91, "limit": 0.9}]
    assert list(diagnose._flags(rows)) == flags


def test_a_second_home_is_an_error(tmp_path) -> None:
    project = Sources(tmp_path)
    (project.folder / "altgrad/diagnostics/again.py").write_text(source().replace("cancellation", "stable_rank"))
    with pytest.raises(AssertionError, match="metric stable_rank has two homes"):
        project.run("-c", "import altgrad.diagnostics")


def test_a_row_is_the_same_after_it_has_travelled() -> None:
    for limit in (None, Limit(above=False, value=0.4, strict=0.5)):
        row = Metric("mine", "share of weights", "What it is.", offline="weight", limit=limit)
        assert Metric.from_json("mine", row.to_json()) == row
    assert Analysis(lambda view: None, (), row).metric is row
