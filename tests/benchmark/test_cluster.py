"""The page about clusters, and what is computed for it. Oracle: arithmetic."""

from __future__ import annotations

import pytest

from tests.benchmark.cluster import CPUS_PER_NODE, NODES, PRICE, page, projected, study_cells

RECORD = {
    "machine": "Example, 2 cores", "date": "2026-01-01",
    "training": {"cells": 24, "steps": 300, "local_s": [100.0, 104.0, 96.0], "ray_s": [105.0, 110.0, 100.0],
                 "overhead": 0.05, "cell_s": 8.75},
    "nothing": {"cells": 1000, "local_s": 200.0, "ray_s": 250.0, "driver_cpu_s": 50.0, "driver_mb": 400},
}  # fmt: skip


def test_a_study_takes_as_long_as_its_cells_or_as_who_hands_them_over():
    one, eight, many, most = projected(RECORD, 4096)
    assert one["hours"] == pytest.approx(4096 / CPUS_PER_NODE * 8.75 / 3600) and one["bound"] == "training"
    assert eight["hours"] == pytest.approx(one["hours"] / 8) and eight["bound"] == "training"
    assert many["hours"] == pytest.approx(max(one["hours"] / 64, 4096 * 0.05 / 3600))
    assert most["hours"] == pytest.approx(4096 * 0.05 / 3600) and most["bound"] == "planning and hand-over"
    assert most["dollars"] == pytest.approx(NODES[-1] * most["hours"] * PRICE)


def test_a_cell_takes_as_long_as_it_takes_on_however_many_machines():
    record = RECORD | {"nothing": RECORD["nothing"] | {"driver_cpu_s": 0.0}}
    assert projected(record, 10)[-1]["hours"] == pytest.approx(8.75 / 3600)


def test_the_page_says_what_was_measured_and_what_was_computed():
    text = page(RECORD, 4096)
    words = " ".join(text.split())
    assert "two local jobs took 100.0 s (96.0 to 104.0), two nodes of one CPU 105.0 s (100.0 to 110.0): +5.0 %" in words
    assert "1,000 of them" in text and "computed for 50.0 s" in text
    assert text.index("## Computed, not measured") < text.index("| 512 |")


def test_the_committed_study_is_counted_by_its_runs(tmp_path):
    (tmp_path / "runs.csv").write_text("experiment\n" + "one\n" * 5)
    assert study_cells(tmp_path / "runs.csv") == 5
