"""Every analysis has a row in the table of metrics and every offline row an analysis; limits flag at their value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from altgrad.diagnostics import ANALYSES
from altgrad.diagnostics.diagnose import Row, _flags
from altgrad.metrics import METRICS, Limit

# Metric, layer, the last value that is fine, and on which side of it a layer is flagged.
LEVELS = [
    ("underflow_frac", "blocks.0.mlp.up", 0.1, +1),
    ("boundary_frac", "blocks.0.mlp.up", 0.01, +1),
    ("grad_snr_db", "blocks.0.mlp.up", 10.0, -1),
    ("gradient_to_noise", "blocks.0.mlp.up", 3**0.5, -1),
    ("effective_rank_kept", "blocks.0.mlp.up", 0.4, -1),
    ("effective_rank_kept", "blocks.0.attn.out", 0.5, -1),
    ("effective_rank_kept", "head", 0.5, -1),
    ("dead_unit_frac", "blocks.0.mlp.up", 0.2, +1),
    ("hessian_top", "blocks.0.mlp.up", 1000.0, +1),
    ("model_hessian_top", "", 1000.0, +1),
]
ROWS = {analysis.name: analysis.metric for analysis in ANALYSES}


def flagged(metric: str, layer: str, value: float) -> list[float]:
    """Return the limits that a layer with this value at its last step is flagged with."""
    return [flag["limit"] for flag in _flags([Row(layer, ROWS[metric].offline, 300, metric, None, value)])]


def test_every_analysis_has_a_row_and_every_offline_row_an_analysis() -> None:
    assert [analysis.name for analysis in ANALYSES if analysis.metric.offline is None] == []
    shared = {analysis.name for analysis in ANALYSES if analysis.row is None}
    assert shared == {name for name, row in METRICS.items() if row.offline}


@pytest.mark.parametrize(("metric", "layer", "level", "side"), LEVELS)
def test_a_layer_is_flagged_beyond_the_level_and_not_at_it(metric: str, layer: str, level: float, side: int) -> None:
    assert flagged(metric, layer, level) == flagged(metric, layer, level * (1 - 1e-9 * side)) == []
    assert flagged(metric, layer, level * (1 + 1e-9 * side)) == [level]


def test_every_offline_limit_has_a_level_here() -> None:
    assert {name for name, *_ in LEVELS} == {name for name, row in ROWS.items() if row.limit}


def test_a_changed_row_changes_what_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flagged("grad_snr_db", "head", 12.0) == []
    row = replace(METRICS["grad_snr_db"], limit=Limit(above=False, value=15.0))
    monkeypatch.setitem(METRICS, "grad_snr_db", row)
    assert flagged("grad_snr_db", "head", 12.0) == [15.0]
