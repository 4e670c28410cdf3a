"""Laws of the table of metrics: each row is whole, and says of its limit what the limit does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from altgrad.diagnostics import ANALYSES
from altgrad.metrics import METRICS, Limit, Metric
from altgrad.metrics.table import ROWS

LAYERS = ("head", "lm.head", "blocks.0.attn.out", "blocks.0.attn.qkv", "blocks.0.mlp.up")


def test_names_are_unique_and_rows_are_whole() -> None:
    assert len(METRICS) == len(ROWS)
    for metric in [*ROWS, *(analysis.row for analysis in ANALYSES if analysis.row)]:
        assert metric.unit and metric.definition[-1] == "." and "  " not in metric.definition, metric.name
        assert set(metric.watched) <= set(metric.live), metric.name
        assert metric.limit or not metric.watched, metric.name
        assert metric.offline or not metric.summary, metric.name
        if metric.limit and metric.offline:
            assert metric.summary, metric.name  # what is flagged by layer is shown for all layers too


def test_a_limit_flags_strict_layers_earlier() -> None:
    limit = Limit(above=False, value=0.5, strict=0.6)
    assert [layer for layer in LAYERS if limit.crossed(layer, 0.55)] == ["head", "lm.head", "blocks.0.attn.out"]
    assert [limit.of(layer) for layer in LAYERS] == [0.6, 0.6, 0.6, 0.5, 0.5]
    assert not limit.crossed("head", 0.6) and limit.crossed("blocks.0.mlp.up", 0.49)
    assert [Limit(above=True, value=0.1).crossed("head", value) for value in (0.1, 0.1001)] == [False, True]


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (Metric("a", "dB", "D.", limit=Limit(above=False, value=10.0)), "D. Flagged below 10 dB."),
        (Metric("a", "%", "D.", limit=Limit(above=True, value=5.0)), "D. Flagged above 5 %."),
        (Metric("a", "share of steps", "D.", limit=Limit(above=True, value=0.5)), "D. Flagged above 50 %."),
        (Metric("a", "ratio", "D.", offline="weight", limit=Limit(above=False, value=0.4, strict=0.5)),
         "D. Flagged below 0.4 (0.5 in attention outputs and the head)."),
        (Metric("a", "1", "D.", ("input", "weight", "grad"), ("grad",), "weight", limit=Limit(above=True, value=2.5)),
         "D. Flagged above 2.5 in incoming gradients and weights."),
        (Metric("a", "1", "D.", ("output",), ("output",), limit=Limit(above=True, value=2.5)), "D. Flagged above 2.5."),
        (Metric("a", "1", "D."), "D."),
    ],
)  # fmt: skip
def test_the_text_is_made_from_the_row(metric: Metric, text: str) -> None:
    assert metric.text == text


def test_the_table_needs_nothing_that_is_slow_to_import() -> None:
    code = "import sys, altgrad.metrics; sys.exit(bool({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
