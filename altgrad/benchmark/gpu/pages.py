"""What README.md and this package's page say of GPUs, between marks, read from the records."""

from __future__ import annotations

import re
import textwrap
from functools import partial
from pathlib import Path

from altgrad.benchmark.machines import load_benches
from altgrad.benchmark.tables import BASELINE, Result, tables_of
from altgrad.config.files import write_text
from altgrad.reporting.document import Block, Bullets, Text
from altgrad.reporting.markdown import blocks_to_markdown, text_to_markdown
from altgrad.reporting.wording import whole

MARKED = re.compile(r"(<!-- make gpu -->\n).*?(<!-- -->\n)", re.DOTALL)
PAGES = ("README.md", "altgrad/benchmark/README.md")
WIDTH = 120
NOT_MEASURED = "**On a GPU, how fast**: not measured. `make gpu` measures it in ten minutes."


def write_pages(root: Path) -> list[Path]:
    """Write both pages anew from ``root/reports/bench`` and return them."""
    written = []
    for path, text in pages(root).items():
        write_text(path, text)
        written.append(path)
    return written


def pages(root: Path) -> dict[Path, str]:
    """Return the content of each page, with what the records say now."""
    benches = [bench for bench in load_benches(root / "reports/bench") if bench["on_gpu"]]
    sentence = "\n".join(_wrapped(text_to_markdown(gpu_sentence(benches))))
    whole = blocks_to_markdown([block for bench in benches for block in gpu_blocks(bench)]) or sentence
    said = {}
    for name, text in zip(PAGES, (sentence, whole), strict=True):
        page = root / name
        found, count = MARKED.subn(partial(_filled, text), page.read_text())
        if count != 1:
            raise ValueError(f"{page} has {count} places for what GPUs can do, not one")
        said[page] = found
    return said


def _filled(text: str, place: re.Match[str]) -> str:
    return f"{place[1]}{text}\n{place[2]}"


def _wrapped(text: str) -> list[str]:
    """Return an item of a list in lines of the pages' width."""
    return textwrap.wrap(f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def gpu_sentence(benches: list[Result]) -> str:
    """Return what the README says: a step beside bf16, a quantizer beside a copy, and runs an hour, for each GPU."""
    return " ".join(map(_sentence, benches)) or NOT_MEASURED


def gpu_blocks(bench: Result) -> list[Block]:
    """Return what one GPU's record says."""
    blocks: list[Block] = [Text(f"**{bench['device']}** ({_source(bench)})."), *tables_of(bench)]
    failed = {name: item["failed"] for name, item in bench.get("items", {}).items() if item["failed"]}
    if failed:
        blocks += [Text("Not measured:"), Bullets([f"{name}: {why}" for name, why in failed.items()])]
    return blocks


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
        said.append(f"{most['jobs']} runs of `{most['model']}` at a time make {whole(most['runs_per_hour'])} an hour")
    return f"**On an {bench['device']}** {'; '.join(said)} ({_source(bench)})." if said else NOT_MEASURED


def _source(bench: Result) -> str:
    """Return driver, torch and commit of the last session."""
    last = bench["sessions"][max(bench["sessions"], key=int)]
    named = {"driver": last.get("driver"), "torch": last.get("torch"), "commit": (last.get("commit") or "")[:10]}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)
