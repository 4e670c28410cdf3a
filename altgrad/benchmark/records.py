"""Reads and writes each machine's record, reports/bench/<machine>.json, and the pages made from the records.

In a record, ``sessions`` maps a session's number to its command, commit and versions, and every result has its
``session``. A new result replaces an earlier result with the same `IDENTITY`; all others stay. A session without
results is dropped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from altgrad.benchmark.tables import BASELINE, Result, tables_of
from altgrad.common.files import read_json, write_record, write_text
from altgrad.reporting.markdown import Block, escaped, integer, to_markdown

MACHINE = ("device", "on_gpu", "threads", "processor", "vector_instructions")  # what identifies a machine
SAME = ("commit", "torch", "driver", "triton")  # a session skips items measured by one with equal values
IDENTITY = ("model", "batch", "elements", "name")  # a result replaces an earlier one of its part with equal values
BENCH = Path("reports/bench")
LEAD = "Step times beside bf16, and what else was measured. A row is of the session that measured it last."
MARKED = re.compile(r"(<!-- make gpu -->\n).*?(<!-- -->\n)", re.DOTALL)
WIDTH = 120
NOT_MEASURED = "**On a GPU, how fast**: not measured. `make gpu` measures it in ten minutes."


class Record:
    """The results of one machine, in a JSON file that is rewritten with each new result.

    Args:
        path: the file; results in an existing file are kept.
        facts: the machine's identity (keys in `MACHINE`), and the session's command, commit and versions.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.content = read_json(path) if path.exists() else {"sessions": {}}
        self.content |= {key: facts[key] for key in MACHINE if key in facts}
        self._number = str(1 + max((int(number) for number in self.content["sessions"]), default=0))
        self._session = {key: value for key, value in facts.items() if key not in MACHINE}

    def put(self, part: str, results: list[Result]) -> None:
        """Add ``results`` to ``part``, replacing those of equal `IDENTITY`, and write; ``limits`` has one result."""
        new = [{**result, "session": self._number} for result in results]
        if part == "limits":
            (self.content[part],) = new
        else:
            repeated = {_identity(result) for result in results}
            kept = [result for result in self.content.get(part, []) if _identity(result) not in repeated]
            self.content[part] = kept + new
        self._write()

    def put_item(self, name: str, took_s: float, failed: str | None = None) -> None:
        """Record the seconds ``took_s`` of an item and its error ``failed`` (None: measured), and write the file."""
        item = {"took_s": round(took_s, 1), "failed": failed, "session": self._number}
        self.content["items"] = self.content.get("items", {}) | {name: item}
        self._write()

    def has(self, name: str) -> bool:
        """Whether a session with the same commit and versions (`SAME`) measured the item ``name`` without error."""
        item = self.content.get("items", {}).get(name)
        if item is None or item["failed"] is not None:
            return False
        session = self.content["sessions"][item["session"]]
        return all(session.get(key) == self._session.get(key) for key in SAME)

    def _write(self) -> None:
        results = [result for part in self.content.values() if isinstance(part, list) for result in part]
        results += [*self.content.get("items", {}).values(), self.content.get("limits", {})]
        used = {result["session"] for result in results if result}
        sessions = self.content["sessions"] | {self._number: self._session}
        self.content["sessions"] = {number: sessions[number] for number in sessions if number in used}
        write_record(self.path, self.content)


def _identity(result: Result) -> tuple[Any, ...]:
    return tuple(result.get(key) for key in IDENTITY)


def load_benches(folder: Path) -> list[Result]:
    """Return the content of all records in ``folder``, one per machine."""
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def write_pages(root: Path) -> list[Path]:
    """Write ``root/reports/bench/README.md`` and the GPU line of ``root/README.md``; return the files written."""
    folder, readme = root / BENCH, root / "README.md"
    benches = load_benches(folder)
    blocks = [LEAD, *(block for bench in benches for block in machine_blocks(bench))]
    write_text(folder / "README.md", f"# What machines can do\n\n{to_markdown(blocks)}\n")
    if not readme.is_file():  # a folder without the project's README.md
        return [folder / "README.md"]
    sentence = escaped(gpu_sentence([bench for bench in benches if bench["on_gpu"]]))
    line = textwrap.fill(f"- {sentence}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    text, count = MARKED.subn(lambda place: f"{place[1]}{line}\n{place[2]}", readme.read_text())
    if count != 1:
        raise ValueError(f"{readme} has {count} places for what GPUs can do, not one")
    write_text(readme, text)
    return [folder / "README.md", readme]


def machine_blocks(bench: Result) -> list[Block]:
    """Return a machine's section of the page: its limits, its tables, and the items that failed."""
    lead = f"**{bench['device']}, {bench['threads']} threads** ({_source(bench)}). {_limits(bench)}"
    failed = [f"{name}: {item['failed']}" for name, item in bench.get("items", {}).items() if item["failed"]]
    return [lead, *tables_of(bench), *[f"Not measured: {'; '.join(failed)}."] * bool(failed)]


def _limits(bench: Result) -> str:
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
    """Return README.md's line with each GPU's step times, operand bandwidth and runs per hour."""
    return " ".join(map(_sentence, benches)) or NOT_MEASURED


def _sentence(bench: Result) -> str:
    parts = []
    steps = {row["name"]: row for row in bench.get("steps", [])}
    if base := steps.get(BASELINE):
        others = [f"{name} {row['over_bf16']:.2f}" for name, row in steps.items() if name != BASELINE]
        rate = bench.get("limits", {}).get("bf16_gemm_operations_per_s")
        share = f" ({100 * base['matmul_operations_per_s'] / rate:.0f} % of its bf16 products)" if rate else ""
        parts.append(
            f"a step of `{base['model']}`, batch {base['batch']} × {base['context']}, takes {base['step_ms']:.1f} ms "
            f"in bf16{share}" + (f", and times as long: {', '.join(others)}" if others else "")
        )
    if tensor := next((row for row in bench.get("operands", []) if row["name"] == "E4M3, a scale per tensor"), None):
        parts.append(f"an operand is made at {100 * tensor['over_copy']:.0f} % of a copy's bandwidth")
    if most := max(bench.get("at_once", []), key=lambda row: row["runs_per_hour"], default=None):
        runs = integer(most["runs_per_hour"])
        parts.append(f"{most['jobs']} runs of `{most['model']}` at a time make {runs} an hour")
    return f"**On an {bench['device']}** {'; '.join(parts)} ({_source(bench)})." if parts else NOT_MEASURED


def _source(bench: Result) -> str:
    last = bench["sessions"][max(bench["sessions"], key=int)]
    named = {"driver": last.get("driver"), "torch": last.get("torch"), "commit": (last.get("commit") or "")[:10]}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)
