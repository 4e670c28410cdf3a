"""Step times in the report: what the records say, and what was not measured."""

from __future__ import annotations

from typing import Any

from altgrad.config.files import write_json
from altgrad.reporting.document import Table, Text
from altgrad.reporting.speed import load_benches, speed_blocks


def bench(**changes: Any) -> dict[str, Any]:
    def step(name: str, batch: int, ms: float, ratio: float) -> dict[str, Any]:
        return {"name": name, "model": "nano", "batch": batch, "step_ms": ms, "over_bf16": ratio,
                "matmul_operations_per_s": 25e9}  # fmt: skip

    limits = {"copy_bytes_per_s": 2e10, "bf16_gemm_operations_per_s": 1e11, "fp32_gemm_operations_per_s": 5e10}
    steps = [step("bf16", 16, 60, 1), step("E4M3", 16, 66, 1.1), step("bf16", 32, 120, 1)]
    return {"device": "A processor", "on_gpu": False, "threads": 2, "command": "python -m altgrad.benchmark",
            "limits": limits, "steps": steps} | changes  # fmt: skip


def test_a_machine_is_a_table_of_steps_by_sizes():
    table, gpu = speed_blocks([bench()])
    assert isinstance(table, Table)
    assert [column.head for column in table.columns] == ["step", "nano, batch 16", "nano, batch 32"]
    assert table.rows[:2] == [["**bf16**", "1.00 (60 ms)", "1.00 (120 ms)"], ["**E4M3**", "1.10 (66 ms)", "–"]]
    assert table.rows[2][1:] == ["25 %", "25 %"]
    assert "A processor, 2 threads" in table.note and "20 GB/s" in table.note and "100 GFLOP/s" in table.note
    assert isinstance(gpu, Text) and "GPU: not measured" in gpu.text


def test_what_was_not_measured_is_said():
    (text,) = speed_blocks([])
    assert "not measured" in text.text and "make bench" in text.text
    assert len(speed_blocks([bench(on_gpu=True)])) == 1


def test_records_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a"):
        write_json(tmp_path / f"{name}.json", bench(device=name))
    assert [record["device"] for record in load_benches(tmp_path)] == ["a", "b"]
    assert load_benches(tmp_path / "nowhere") == []
