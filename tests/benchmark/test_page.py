"""The page of what machines can do, from their records. Oracle: the made record, and the pages of this checkout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from altgrad.benchmark.records import Record, machine_blocks, sizes, write_page
from altgrad.common.files import read_json, write_json
from altgrad.reporting.markdown import Table
from tests.benchmark.made import record

ROOT = Path(__file__).parents[2]
CPU = {"device": "A (R) processor", "on_gpu": False, "threads": 2}


def shown(bench: dict[str, Any]) -> tuple[str, dict[str, Table]]:
    """Return the sentences of a machine, and its tables by their first head."""
    blocks = machine_blocks(bench)
    words = " ".join(block for block in blocks if isinstance(block, str))
    return words, {block.columns[0].head: block for block in blocks if isinstance(block, Table)}


def test_a_machine_is_a_lead_and_a_table_per_part():
    said, tables = shown(record())
    assert "An Imaginary GPU, 16 threads" in said and "3,000 GB/s" in said and "800 TFLOP/s in bf16 and 50 in" in said
    assert "step: E7M0: had not ended after 115 s" in said
    assert set(tables) == {"operand", "step", "peak MB", "at a time", "model", "arm"}
    assert tables["step"].rows[1:] == [["**E3M4**", "1.07 (40 ms)"], ["bf16 step, share of the limit", "38 %"]]
    assert tables["operand"].rows[1][1] == "failed: no kernel"
    assert tables["peak MB"].rows == [["**bf16**", "200 (1.00)"], ["**E3M4**", "not measured"]]
    assert tables["arm"].rows == [["**rung**", "1.25", "1.20 to 1.30", "0.50", "20 ms", "97", "not measured"]]


def test_what_a_record_lacks_is_left_out():
    said, tables = shown(CPU | {"sessions": record()["sessions"]})
    assert "limits were not measured" in said and not tables
    without = shown({name: value for name, value in record().items() if name != "limits"})[1]
    assert without["step"].rows[-1][1:] == ["not measured"]


def test_narrow_models_and_small_batches_come_first_whatever_was_measured_first():
    measured = [("wide", 16, 384), ("narrow", 64, 128), ("narrow", 8, 128), ("wide", 16, 384)]
    results = [{"model": model, "batch": batch, "width": width} for model, batch, width in measured]
    assert sizes(results) == [("narrow", 8), ("narrow", 64), ("wide", 16)]
    for result in results:
        del result["width"]
    assert sizes(results) == [("wide", 16), ("narrow", 8), ("narrow", 64)]


def test_the_committed_page_is_what_the_records_give(tmp_path):
    shutil.copytree(ROOT / "reports/bench", tmp_path / "reports/bench")
    committed = (ROOT / "reports/bench/README.md").read_text()
    assert write_page(tmp_path).read_text() == committed, "python -m altgrad.benchmark --pages"


def test_the_page_has_each_machine_in_the_order_of_their_names(tmp_path):
    write_json(tmp_path / "reports/bench/cpu.json", CPU | {"sessions": record()["sessions"]})
    write_json(tmp_path / "reports/bench/gpu_imaginary.json", record())
    page = write_page(tmp_path).read_text()
    assert page.index("processor") < page.index("Imaginary")
    assert "(driver 580.1, torch 2.11.0, commit 0123456789)" in page


def test_a_result_measured_again_replaces_itself_alone_and_a_session_without_any_is_forgotten(tmp_path):
    def session(command: str) -> Record:
        return Record(tmp_path / "machine.json", CPU | {"command": command, "commit": "c1"})

    def step(batch: int, name: str) -> dict[str, Any]:
        return {"model": "nano", "batch": batch, "name": name}

    first = session("first")
    first.put("steps", [step(16, "bf16"), step(16, "E7M0")])
    first.put("steps", [step(8, "bf16")])
    second = session("second")
    second.put("steps", [step(16, "bf16")])
    second.put("limits", [{"copy_bytes_per_s": 2}])
    found = read_json(tmp_path / "machine.json")
    rows = [(result["batch"], result["name"], result["session"]) for result in found["steps"]]
    assert rows == [(16, "E7M0", "1"), (8, "bf16", "1"), (16, "bf16", "2")]
    assert found["limits"]["session"] == "2" and {name: found[name] for name in CPU} == CPU
    session("third").put("steps", [step(16, "E7M0"), step(8, "bf16")])
    kept = read_json(tmp_path / "machine.json")["sessions"]
    assert kept == {"2": {"command": "second", "commit": "c1"}, "3": {"command": "third", "commit": "c1"}}
