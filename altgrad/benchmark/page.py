"""The page of what machines can do, from the records of `make bench`: a lead, a figure and tables for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altgrad.benchmark.figure import step_times
from altgrad.benchmark.machines import PARTS, commands, load_benches, picture_name
from altgrad.benchmark.tables import tables_of
from altgrad.config.files import write_text
from altgrad.reporting.document import Block, Bullets, Fold, Picture, Text
from altgrad.reporting.figures.style import drawing, save
from altgrad.reporting.markdown import blocks_to_markdown
from altgrad.reporting.wording import joined

BENCH = Path("reports/bench")
LEAD = "Step times beside bf16, and what else `make bench` measured. A row is of the session that measured it last."


def write_page(folder: Path = BENCH) -> Path:
    """Write ``folder/README.md`` and its figures from the records in ``folder``; return the page."""
    benches = load_benches(folder)
    blocks = [Text(LEAD), *speed_blocks(benches, _drawn(benches, folder / "figures"))]
    write_text(folder / "README.md", f"# What machines can do\n\n{blocks_to_markdown(blocks)}\n")
    return folder / "README.md"


def _drawn(benches: list[dict[str, Any]], folder: Path) -> dict[str, Picture]:
    """Draw the step times of every machine that has any."""
    pictures = {}
    for bench in benches:
        with drawing():
            figure = step_times(bench)
            if figure is not None:
                name, device = picture_name(bench), bench["device"]
                save(figure, folder, name)
                pictures[name] = Picture(
                    name,
                    f"Time of a training step on {device} over that of the bf16 step, by contestant and size",
                    f"{device}: time of a step over that of a bf16 step of the same round, median and quartiles. "
                    "Left of the line is faster than bf16.",
                )
    return pictures


def speed_blocks(benches: list[dict[str, Any]], pictures: dict[str, Picture]) -> list[Block]:
    """Return the blocks of every machine, and sentences on what was not measured."""
    blocks: list[Block] = []
    for bench in benches:
        blocks += _machine(bench, pictures)
    if not benches:
        blocks.append(Text("Step times beside bf16 were not measured on any machine; `make bench` does it."))
    elif not any(bench["on_gpu"] and bench.get("steps") for bench in benches):
        blocks.append(Text("Step times on a GPU: not measured."))
    return blocks


def _machine(bench: dict[str, Any], pictures: dict[str, Picture]) -> list[Block]:
    blocks: list[Block] = [Text(f"**{bench['device']}, {bench['threads']} threads.** {_lead(bench)}")]
    name = picture_name(bench)
    blocks += [pictures[name]] if name in pictures else []
    return [*blocks, *tables_of(bench), *_absent(bench), _source(bench)]


def _lead(bench: dict[str, Any]) -> str:
    limits = bench.get("limits")
    if not limits:
        return "Its limits were not measured."
    bf16, fp32 = limits["bf16_gemm_operations_per_s"], limits["fp32_gemm_operations_per_s"]
    unit, size = ("TFLOP/s", 1e12) if bf16 >= 1e13 else ("GFLOP/s", 1e9)
    return (
        f"At best it copies {limits['copy_bytes_per_s'] / 1e9:,.0f} GB/s, read and written bytes both counted, and "
        f"multiplies {bf16 / size:.0f} {unit} in bf16 and {fp32 / size:.0f} in float32."
    )


def _absent(bench: dict[str, Any]) -> list[Block]:
    absent = [part for part in PARTS if not bench.get(part) and part != "limits"]
    if not absent:
        return []
    names = joined([PARTS[part] for part in absent])
    return [Text(f"Not measured on this machine: {names} (`python -m altgrad.benchmark --parts {' '.join(absent)}`).")]


def _source(bench: dict[str, Any]) -> Fold:
    parts: dict[tuple[str, str | None], list[str]] = {}
    for part in PARTS:
        for source in commands(bench, part):
            parts.setdefault(source, []).append(PARTS[part])
    lines = [
        f"`{command}`" + (f", commit `{commit[:10]}`" if commit else "") + f": {joined(names)}."
        for (command, commit), names in parts.items()
    ]
    return Fold("Commands and commits that measured this", [Bullets(lines)])
