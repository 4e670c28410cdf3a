"""Step times of whole machines, from the records of `make bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altgrad.config.files import read_json
from altgrad.reporting.document import Block, Column, Table, Text
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE

BASELINE = "bf16"


def load_benches(folder: Path) -> list[dict[str, Any]]:
    """Return the records in ``folder``, one per machine."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def speed_blocks(benches: list[dict[str, Any]]) -> list[Block]:
    """Return a table per machine, and a sentence on what was not measured."""
    blocks: list[Block] = [_table(bench) for bench in benches]
    if not benches:
        blocks.append(Text("Step times beside bf16 were not measured on any machine; `make bench` does it."))
    elif not any(bench["on_gpu"] for bench in benches):
        blocks.append(Text("Step times on a GPU: not measured."))
    return blocks


def _table(bench: dict[str, Any]) -> Table:
    """Contestants by sizes: the ratio to the bf16 step and its milliseconds."""
    steps = {(step["name"], step["model"], step["batch"]): step for step in bench["steps"]}
    names = list(dict.fromkeys(name for name, *_ in steps))
    sizes = list(dict.fromkeys((model, batch) for _, model, batch in steps))
    columns = [words("step"), *(Column(f"{model}, batch {batch}") for model, batch in sizes)]
    rows = [[f"**{name}**", *(_cell(steps.get((name, *size))) for size in sizes)] for name in names]
    limits = bench["limits"]
    rate = limits["bf16_gemm_operations_per_s"]
    shares = [steps[BASELINE, *size]["matmul_operations_per_s"] / rate for size in sizes]
    rows.append(["bf16 step, share of the GEMM rate", *(f"{100 * share:.0f} %" for share in shares)])
    note = (
        f"{bench['device']}, {bench['threads']} threads, compiled: time of a training step over that of the bf16 "
        f"step of the same round, median, and its milliseconds. Weights and inputs are quantized in the format, "
        f"gradients in E5M2, with a scale per tensor of the present step unless said. The machine copies "
        f"{limits['copy_bytes_per_s'] / 1e9:.0f} GB/s and multiplies {rate / 1e9:.0f} GFLOP/s in bf16, "
        f"{limits['fp32_gemm_operations_per_s'] / 1e9:.0f} in float32. From `{bench['command']}`."
    )
    return Table(columns, rows, note)


def _cell(step: dict[str, Any] | None) -> str:
    if step is None:
        return NONE
    return f"{step['over_bf16']:.2f} ({step['step_ms']:.0f} ms)"
