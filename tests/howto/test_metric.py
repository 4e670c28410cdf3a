"""A metric of the diagnosis is one file, as altgrad/diagnostics/README.md says. Oracle: the report, sums by hand."""

import json

import pandas as pd
import pytest
from safetensors.numpy import load_file

from tests.howto.conftest import blocks

KEY = "E4M3-adamw-0-1"


def test_a_metric_is_measured_defined_and_in_the_report(copy) -> None:
    project = copy()
    (source,) = blocks("diagnostics/README.md", "python", "How to add a metric")
    (project.folder / "altgrad/diagnostics/cancellation.py").write_text(source)
    before = {path: path.stat().st_mtime_ns for path in (project.folder / "data/runs").rglob("*.*")}
    report = project.repro()
    assert "| cancellation, ratio |" in report
    assert "**cancellation**: |Σ w| / Σ |w|" in report.replace("\\", "") and "Flagged above 0.9." in report
    assert "cancellation [ratio]" in project.run("-m", "altgrad.metrics")
    assert project.changed() == {"altgrad/diagnostics/cancellation.py"}
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing was trained

    rows = pd.read_parquet(project.folder / f"data/diag/{KEY}.parquet")
    found = rows[(rows["metric"] == "cancellation") & (rows["layer"] == "blocks.0.mlp.up")].iloc[-1]["value"]
    w = load_file(project.folder / f"data/runs/{KEY}/model.safetensors")["blocks.0.mlp.up.weight"].astype("float64")
    assert found == pytest.approx(abs(w.sum()) / abs(w).sum(), rel=1e-12)


def test_the_limit_of_a_new_metric_flags_layers(copy) -> None:
    project = copy()
    (source,) = blocks("diagnostics/README.md", "python", "How to add a metric")
    (project.folder / "altgrad/diagnostics/cancellation.py").write_text(source.replace("value=0.9", "value=0.0"))
    project.repro()
    flags = json.loads((project.folder / f"data/diag/{KEY}.json").read_text())["flags"]
    assert {flag["limit"] for flag in flags if flag["metric"] == "cancellation"} == {0.0}


def test_a_second_home_is_an_error(copy) -> None:
    project = copy()
    (source,) = blocks("diagnostics/README.md", "python", "How to add a metric")
    (project.folder / "altgrad/diagnostics/again.py").write_text(source.replace("cancellation", "stable_rank"))
    with pytest.raises(AssertionError, match="metric stable_rank has two homes"):
        project.run("-c", "import altgrad.diagnostics")
