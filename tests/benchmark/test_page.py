"""The page of what machines can do: what the records say, and what was not measured."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text as Label

from altgrad.benchmark.figure import step_times
from altgrad.benchmark.machines import PARTS, load_benches, picture_name, sizes
from altgrad.benchmark.page import speed_blocks, write_page
from altgrad.config.files import write_json
from altgrad.reporting.document import Block, Fold, Picture, Table, Text
from altgrad.reporting.figures.style import drawing

NAMES = ("bf16", "E4M3", "E4M3, a scale per row, native")
SIZES = (("nano", 16), ("nano", 8), ("micro", 16))


def bench(*without: str, **changes: Any) -> dict[str, Any]:
    """Return a record of everything but the parts ``without``."""

    def per_contestant(values: dict[str, Any], sizes: Any = SIZES) -> list[dict[str, Any]]:
        found = itertools.product(sizes, NAMES)
        return [
            {"model": model, "batch": batch, "name": name, "session": "2", **values} for (model, batch), name in found
        ]

    step = {"step_ms": 66.0, "over_bf16": 1.1, "over_bf16_quartiles": [1.05, 1.2], "tokens_per_s": 31030,
            "matmul_operations_per_s": 25e9}  # fmt: skip
    quantizer = {"format": "E4M3", "elements": 1 << 22, "session": "2"}
    parts = {
        "limits": {"copy_bytes_per_s": 2e10, "bf16_gemm_operations_per_s": 1e11, "fp32_gemm_operations_per_s": 5e10,
                   "session": "1"},
        "steps": per_contestant(step),
        "memory": per_contestant({"state_mb": 15.9, "peak_mb": 120.0}),
        "compile": per_contestant({"cold_s": 21.0, "warm_s": 2.5}, SIZES[:1]),
        "optimizers": [{"model": "mini", "format": "E4M3", "name": name, "parameters": 12.2e6, "step_ms": 20.0,
                        "over_adamw": 1.25, "over_adamw_quartiles": [1.2, 1.3], "state_mb": 97.0, "peak_mb": peak,
                        "session": "2"} for name, peak in (("stiff_update", 110.0), ("rung", None))],
        "quantizers": [{"name": "ours, compiled", "median_ns_per_element": 0.8, **quantizer},
                       {"name": "QPyTorch", "absent": "not installed", **quantizer}],
        "study": [{"model": "pico", "name": "a grid of cells", "cells": 24, "steps": 300, "jobs": 2, "took_s": 90.0,
                   "cells_per_hour": 960, "cell_s": 7.5, "steps_s": 5.0, "loading_s": 0.1, "observe_s": 0.6,
                   "evaluate_s": 0.5, "around_s": 0.3, "outside_s": 1.0, "session": "2"}],
    }  # fmt: skip
    sessions = {
        number: {"command": f"python -m altgrad.benchmark {number}", "commit": "0123456789abcdef"} for number in "12"
    }
    kept = {part: results for part, results in parts.items() if part not in without}
    return {"device": "A processor", "on_gpu": False, "threads": 2, "sessions": sessions, **kept, **changes}


def tables(blocks: list[Block]) -> dict[str, Table]:
    """Return the tables that are open, by their first head."""
    return {block.columns[0].head: block for block in blocks if isinstance(block, Table)}


def words(blocks: list[Block]) -> str:
    return " ".join(block.text for block in blocks if isinstance(block, Text))


def test_what_a_gpu_multiplies_is_told_in_a_larger_unit():
    limits = {"copy_bytes_per_s": 2.8e12, "bf16_gemm_operations_per_s": 7.7e14, "fp32_gemm_operations_per_s": 5e13,
              "session": "1"}  # fmt: skip
    said = words(speed_blocks([bench(limits=limits)], {}))
    assert "2,800 GB/s" in said and "770 TFLOP/s in bf16 and 50 in float32" in said


def test_a_machine_is_a_lead_and_a_table_per_part():
    blocks = speed_blocks([bench()], {})
    found = tables(blocks)
    assert len(found) == 5
    steps = found["step"]
    assert [column.head for column in steps.columns[1:]] == ["nano, batch 8", "nano, batch 16", "micro, batch 16"]
    assert steps.rows[1] == ["**E4M3**", *["1.10 (66 ms)"] * 3] and steps.rows[-1][1:] == ["25 %"] * 3
    memory = found["peak MB, first step s"]
    assert memory.rows[0] == ["**bf16**", *["120 (1.00)"] * 3, "21.0", "2.5"]
    assert found["arm"].rows == [["**stiff_update**", "1.25", "1.20 to 1.30", "20 ms", "97", "110"],
                                 ["**rung**", "1.25", "1.20 to 1.30", "20 ms", "97", "not measured"]]  # fmt: skip
    assert found["round(x · s) / s"].rows == [["**ours, compiled**", "0.8", "50 %"], ["QPyTorch", "not installed", "–"]]
    assert found["model"].rows == [["`pico`", "960", "7.5", "5.00", "0.10", "0.60", "0.50", "0.30", "1.00"]]
    assert "A processor, 2 threads" in words(blocks) and "20 GB/s" in words(blocks) and "100 GFLOP/s" in words(blocks)
    assert "Not measured" not in words(blocks) and "GPU: not measured" in words(blocks)


@pytest.mark.parametrize("missing", [*PARTS, "all"])
def test_a_part_that_is_missing_is_named_and_the_rest_is_shown(missing):
    without = PARTS if missing == "all" else (missing,)
    blocks = speed_blocks([bench(*without)], {})
    shown, said = tables(blocks), words(blocks)
    if missing == "limits":
        assert "limits were not measured" in said and "not measured" in shown["step"].rows[-1]
    else:
        assert f"--parts {missing}`" in said or missing == "all"
        assert len(shown) == (0 if missing == "all" else 5 if missing in ("memory", "compile") else 4)
    if missing == "compile":
        assert shown["peak MB"].rows[0] == ["**bf16**", *["120 (1.00)"] * 3]


def test_memory_that_the_system_does_not_tell_is_not_measured():
    record = bench()
    for result in record["memory"]:
        result["peak_mb"] = None
    assert tables(speed_blocks([record], {}))["peak MB, first step s"].rows[0][1] == "not measured"


def test_each_command_is_named_once_with_its_commit_and_its_parts():
    folds = [block for block in speed_blocks([bench()], {}) if isinstance(block, Fold)]
    lines = folds[-1].blocks[0].items
    assert [line.split("`")[1] for line in lines] == [f"python -m altgrad.benchmark {number}" for number in "12"]
    assert lines[0].endswith("commit `0123456789`: the machine's limits.") and "compile time" in lines[1]


def test_what_no_machine_measured_is_said():
    (text,) = speed_blocks([], {})
    assert "not measured" in text.text and "make bench" in text.text
    assert "GPU" not in words(speed_blocks([bench(on_gpu=True)], {}))


def test_narrow_models_and_small_batches_come_first_whatever_was_measured_first():
    measured = [("wide", 16, 384), ("narrow", 64, 128), ("narrow", 8, 128), ("wide", 16, 384)]
    results = [{"model": model, "batch": batch, "width": width} for model, batch, width in measured]
    assert sizes(results) == [("narrow", 8), ("narrow", 64), ("wide", 16)]
    for result in results:
        del result["width"]
    assert sizes(results) == [("wide", 16), ("narrow", 8), ("narrow", 64)]


def test_every_machine_has_its_own_picture():
    one, two = bench(), bench(device="Another (R) processor", threads=8)
    assert picture_name(two) == "step_times_another_r_processor_8_threads"
    pictures = {picture_name(record): Picture(picture_name(record), "alt", "caption") for record in (one, two)}
    assert [block for block in speed_blocks([one, two], pictures) if isinstance(block, Picture)] == [*pictures.values()]


def test_the_figure_shows_every_contestant_beside_the_baseline_and_its_quartiles():
    with drawing():
        figure = step_times(bench())
    panels = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_title(loc="left") for axis in panels] == ["nano, batch 8", "nano, batch 16", "micro, batch 16"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(NAMES[1:])
    whisker, dot, *_, reference = (line.get_xdata() for line in panels[0].lines)
    assert list(whisker) == [1.05, 1.2] and list(dot) == [1.1] and list(reference) == [1, 1]
    assert step_times(bench("steps")) is None


def test_no_text_leaves_the_figure():
    with drawing():
        figure = step_times(bench())
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    frame, renderer = figure.bbox.padded(1), canvas.get_renderer()
    titles = [label for axis in figure.axes for label in axis.findobj(Label) if "batch" in label.get_text()]
    for label in [*titles, *figure.axes[0].get_yticklabels(), *figure.texts]:
        box = label.get_window_extent(renderer)
        assert frame.contains(*box.min) and frame.contains(*box.max), label.get_text()
    assert len(titles) == len(SIZES)


def test_records_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a"):
        write_json(tmp_path / f"{name}.json", bench(device=name))
    assert [record["device"] for record in load_benches(tmp_path)] == ["a", "b"]
    assert load_benches(tmp_path / "nowhere") == []


def test_the_page_shows_the_machines(tmp_path):
    for name, record in {"a": bench(), "b": bench(*PARTS, device="Nothing measured")}.items():
        write_json(tmp_path / f"{name}.json", record)
    text = write_page(tmp_path).read_text()
    assert "figures/step_times_a_processor_2_threads.png" in text and "Nothing measured" in text
    assert "a scale per row, native" in text
    assert (tmp_path / "figures/step_times_a_processor_2_threads.png").exists()


def test_the_committed_page_is_what_the_records_give(tmp_path):
    place = Path(__file__).parents[2] / "reports/bench"
    for record in place.glob("*.json"):
        shutil.copy(record, tmp_path)
    assert write_page(tmp_path).read_text() == (place / "README.md").read_text()
