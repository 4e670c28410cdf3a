"""The page of what machines can do, from the records of `make bench` and `make gpu`, and README.md's line on GPUs."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from altgrad.benchmark.record import BASELINE, load_benches
from altgrad.benchmark.tables import Result, tables_of
from altgrad.common.files import write_text
from altgrad.reporting.markdown import Block, escaped, integer, to_markdown

BENCH = Path("reports/bench")
LEAD = "Step times beside bf16, and what else was measured. A row is of the session that measured it last."
MARKED = re.compile(r"(<!-- make gpu -->\n).*?(<!-- -->\n)", re.DOTALL)
WIDTH = 120
NOT_MEASURED = "**On a GPU, how fast**: not measured. `make gpu` measures it in ten minutes."


def write_pages(root: Path) -> list[Path]:
    """Write the page of ``root/reports/bench`` and README.md's line on GPUs; return the files written."""
    folder, readme = root / BENCH, root / "README.md"
    benches = load_benches(folder)
    blocks = [LEAD, *(block for bench in benches for block in machine_blocks(bench))]
    write_text(folder / "README.md", f"# What machines can do\n\n{to_markdown(blocks)}\n")
    if not readme.is_file():  # the package alone
        return [folder / "README.md"]
    said = escaped(gpu_sentence([bench for bench in benches if bench["on_gpu"]]))
    line = textwrap.fill(f"- {said}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    text, count = MARKED.subn(lambda place: f"{place[1]}{line}\n{place[2]}", readme.read_text())
    if count != 1:
        raise ValueError(f"{readme} has {count} places for what GPUs can do, not one")
    write_text(readme, text)
    return [folder / "README.md", readme]


def machine_blocks(bench: dict[str, Any]) -> list[Block]:
    """Return what one machine's record says: its limits, its tables, and what failed."""
    lead = f"**{bench['device']}, {bench['threads']} threads** ({_source(bench)}). {_limits(bench)}"
    failed = [f"{name}: {item['failed']}" for name, item in bench.get("items", {}).items() if item["failed"]]
    return [lead, *tables_of(bench), *[f"Not measured: {'; '.join(failed)}."] * bool(failed)]


def _limits(bench: dict[str, Any]) -> str:
    limits = bench.get("limits")
    if not limits:
        return "Its limits were not measured."
    bf16, fp32 = limits["bf16_gemm_operations_per_s"], limits["fp32_gemm_operations_per_s"]
    unit, size = ("TFLOP/s", 1e12) if bf16 >= 1e13 else ("GFLOP/s", 1e9)
    return (
        f"At best it copies {limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s, read and written bytes both counted, and "
        f"multiplies {bf16 / size:.0f} {unit} in bf16 and {fp32 / size:.0f} in float32."
    )


def gpu_sentence(benches: list[Result]) -> str:
    """Return what README.md says: a step beside bf16, an operand beside a copy, and runs an hour, for each GPU."""
    return " ".join(map(_sentence, benches)) or NOT_MEASURED


def _sentence(bench: Result) -> str:
    said = []
    steps = {row["name"]: row for row in bench.get("steps", [])}
    if base := steps.get(BASELINE):
        others = [f"{name} {row['over_bf16']:.2f}" for name, row in steps.items() if name != BASELINE]
        rate = bench.get("limits", {}).get("bf16_gemm_operations_per_s")
        share = f" ({100 * base['matmul_operations_per_s'] / rate:.0f} % of its bf16 products)" if rate else ""
        said.append(
            f"a step of `{base['model']}`, batch {base['batch']} × {base['context']}, takes {base['step_ms']:.1f} ms "
            f"in bf16{share}" + (f", and times as long: {', '.join(others)}" if others else "")
        )
    if tensor := next((row for row in bench.get("operands", []) if row["name"] == "E4M3, a scale per tensor"), None):
        said.append(f"an operand is made at {100 * tensor['over_copy']:.0f} % of a copy's bandwidth")
    if most := max(bench.get("at_once", []), key=lambda row: row["runs_per_hour"], default=None):
        said.append(f"{most['jobs']} runs of `{most['model']}` at a time make {integer(most['runs_per_hour'])} an hour")
    return f"**On an {bench['device']}** {'; '.join(said)} ({_source(bench)})." if said else NOT_MEASURED


def _source(bench: Result) -> str:
    last = bench["sessions"][max(bench["sessions"], key=int)]
    named = {"driver": last.get("driver"), "torch": last.get("torch"), "commit": (last.get("commit") or "")[:10]}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)
