"""The tables of one machine: contestants by sizes, quantizers by sizes, the pipeline by cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from altgrad.benchmark.machines import sizes
from altgrad.reporting.document import Column, Table
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE, number, significant, whole

BASELINE = "bf16"
NOT_MEASURED = "not measured"
BYTES_MOVED = 8  # per element of a quantization: a float32 read and one written

Result = dict[str, Any]


def steps_table(bench: dict[str, Any]) -> Table:
    """Contestants by sizes: the time of a step over that of bf16, and its milliseconds."""
    note = (
        "Time of a training step over that of a bf16 step of the same round, median, and its milliseconds; compiled. "
        "Weights and inputs are quantized in the format, gradients in E5M2, with a scale per tensor of the present "
        "step unless said. Share: the operations of the linear layers against the bf16 limit above."
    )
    columns, rows = _by_size(bench["steps"], lambda step: f"{step['over_bf16']:.2f} ({_ms(step['step_ms'])})")
    rate = bench.get("limits", {}).get("bf16_gemm_operations_per_s")
    baseline = {_size(step): step["matmul_operations_per_s"] for step in bench["steps"] if step["name"] == BASELINE}
    shares = [
        f"{100 * baseline[size] / rate:.0f} %" if rate and size in baseline else NOT_MEASURED
        for size in sizes(bench["steps"])
    ]
    return Table([words("step"), *columns], [*rows, ["bf16 step, share of the limit", *shares]], note)


def tokens_table(bench: dict[str, Any]) -> Table:
    """Contestants by sizes: tokens per second, of the median step."""
    columns, rows = _by_size(bench["steps"], lambda step: whole(step.get("tokens_per_s")))
    return Table([words("tokens/s"), *columns], rows)


def memory_table(bench: dict[str, Any]) -> Table:
    """Contestants: seconds to the first step, cold and warm, then peak memory by size."""
    memory, compiled = bench.get("memory", []), bench.get("compile", [])
    peaks = {(_size(result), result["name"]): result["peak_mb"] for result in memory}

    def cell(result: Result) -> str:
        base = peaks.get((_size(result), BASELINE))
        if result["peak_mb"] is None:
            return NOT_MEASURED
        return whole(round(result["peak_mb"])) + (f" ({result['peak_mb'] / base:.2f})" if base else "")

    columns, rows = _by_size(memory, cell)
    shown = {row[0]: row[1:] for row in rows}
    seconds = {f"**{result['name']}**": [number(result[key], 1) for key in ("cold_s", "warm_s")] for result in compiled}
    body = [
        [name, *shown.get(name, [NONE] * len(columns)), *seconds.get(name, [NOT_MEASURED] * 2)]
        for name in dict.fromkeys([*shown, *seconds])
    ]
    heads = [
        words("peak MB, first step s" if memory else "first step s"),
        *columns,
        Column("cold, s"),
        Column("warm, s"),
    ]
    return Table(heads, body, _memory_note(memory, compiled))


def _memory_note(memory: list[Result], compiled: list[Result]) -> str:
    notes = []
    if memory:
        notes.append(
            "MB (10^6 bytes) at the peak of three warm steps, and over bf16's, each in a process of its own: "
            "parameters, optimizer state, gradients, activations and quantized copies. On a CPU, the growth of the "
            "resident set, freed tensors given back at once, plus what lies there between steps; on a GPU, what torch "
            "has allocated."
        )
    if compiled:
        size = f"{compiled[0]['model']}, batch {compiled[0]['batch']}"
        notes.append(
            f"First step: seconds from its call to its end in a new process ({size}), compiling included; cold with "
            "an empty compile cache, warm with the cache that this left."
        )
    return " ".join(notes)


def optimizers_table(bench: dict[str, Any]) -> Table:
    """Arms: the time of a step over that of torch's fused AdamW, and the memory that a step takes."""
    results = bench["optimizers"]
    first = results[0]
    rows = []
    for row in results:
        low, high = row["over_adamw_quartiles"]
        rows.append([
            f"**{row['name']}**", f"{row['over_adamw']:.2f}", f"{low:.2f} to {high:.2f}", _ms(row["step_ms"]),
            whole(round(row["state_mb"])), NOT_MEASURED if row["peak_mb"] is None else whole(round(row["peak_mb"])),
        ])  # fmt: skip
    columns = [words("arm"), Column("over AdamW"), Column("quartiles"), Column("step"), Column("state MB"),
               Column("peak MB")]  # fmt: skip
    note = (
        "A step of the optimizer alone, told the norm of the gradients as in training, on the "
        f"{significant(first['parameters'] / 1e6)} M parameters of `{first['model']}`, weights in {first['format']}, "
        "over torch's fused AdamW in the same round, median. "
        "State: the optimizer's tensors; peak: with what a step takes besides, weights and gradients aside."
    )
    return Table(columns, rows, note)


def quantizers_table(bench: dict[str, Any]) -> Table:
    """Ways to quantize by tensor size: nanoseconds per element, and the share of the copy bandwidth reached."""
    results = bench["quantizers"]
    elements = sorted({result["elements"] for result in results})
    largest = max(elements)
    medians = {(result["name"], result["elements"]): result.get("median_ns_per_element") for result in results}
    absent = {result["name"]: result["absent"] for result in results if "absent" in result}
    rate = bench.get("limits", {}).get("copy_bytes_per_s")
    rows = []
    for name in dict.fromkeys(result["name"] for result in results):
        cells = [absent.get(name) or significant(medians.get((name, size))) for size in elements]
        shown = f"**{name}**" if name.startswith("ours") else name
        rows.append([shown, *cells, _share(medians.get((name, largest)), rate)])
    columns = [words("round(x · s) / s"), *(Column(f"{_elements(size)}, ns") for size in elements)]
    note = (
        f"Nanoseconds per element, median, float32 in and out, elements by column; ours in {results[0]['format']}. "
        f"Share: {BYTES_MOVED} bytes per element of the largest tensor against the copy limit above. "
        f"{NONE}: too slow for tensors of this size."
    )
    return Table([*columns, Column("share of the limit")], rows, note)


def pipeline_table(bench: dict[str, Any]) -> Table:
    """What the pipeline takes by number of cells."""
    columns = [Column("cells"), Column("nothing to do, s"), Column("every stage run, s"), Column("per cell, s")]
    rows = [
        [whole(row["cells"]), number(row["no_op_s"], 1), number(row["first_s"], 1), number(row["per_cell_s"], 2)]
        for row in sorted(bench["pipeline"], key=lambda row: row["cells"])
    ]
    note = (
        "`make repro` on a throw-away pipeline of this shape (two stages per cell), whose stages only write a line: "
        "with nothing to do (median of 3), and the first time, as a whole and divided by the cells."
    )
    return Table(columns, rows, note)


def monitors_table(bench: dict[str, Any]) -> Table:
    """What is recorded inside a run, by format and settings: a step without it, one with it, its share of the time."""
    columns = [
        words("recorded"),
        Column("every, steps"),
        Column("step, ms"),
        Column("watched step, ms"),
        Column("share"),
    ]
    rows = [
        [
            f"**{row['name']}**", whole(row["every"]), number(row["step_ms"], 1), number(row["watched_ms"], 1),
            f"{100 * row['share']:.1f} % ({' to '.join(f'{100 * end:.1f}' for end in row['share_quartiles'])})",
        ]
        for row in bench["monitors"]
    ]  # fmt: skip
    first = bench["monitors"][0]
    note = (
        f"Steps of `{first['model']}` that the settings of `monitor:` have watched, beside steps of the same run that "
        f"they do not; {first['rounds']} of each, medians. Share: the difference over the steps from one look to the "
        "next, of the step's time with nothing watched; quartiles."
    )
    return Table(columns, rows, note)


def study_table(bench: dict[str, Any]) -> Table:
    """What a cell of a study takes, by model, and in what."""
    parts = {
        "steps": "steps_s", "loading a graph": "loading_s", "instrumented passes": "observe_s",
        "evaluations": "evaluate_s", "rest of training": "around_s", "outside": "outside_s",
    }  # fmt: skip
    columns = [words("model"), Column("cells an hour"), Column("a cell, s"), *(Column(f"{name}, s") for name in parts)]
    rows = [
        [
            f"`{row['model']}`", whole(row["cells_per_hour"]), number(row["cell_s"], 1),
            *(number(row[key], 2) for key in parts.values()),
        ]
        for row in bench["study"]
    ]  # fmt: skip
    first = bench["study"][0]
    note = (
        f"A grid of {first['cells']} cells of {first['steps']} steps, {first['jobs']} at a time, really trained and "
        "diagnosed in a throw-away copy of the project whose graphs were compiled before; no report. A cell: the "
        "seconds of one of the jobs, and where they go on the mean cell. Outside: diagnosis, hand-over to DVC, waiting."
    )
    return Table(columns, rows, note)


#: The table of each part that has one to itself, in the report's order.
TABLES: dict[str, Callable[[Result], Table]] = {
    "optimizers": optimizers_table,
    "quantizers": quantizers_table,
    "pipeline": pipeline_table,
    "monitors": monitors_table,
    "study": study_table,
}


def _by_size(results: list[Result], cell: Callable[[Result], str]) -> tuple[list[Column], list[list[str]]]:
    """Return a column per size and a row per contestant, its name first, ``cell`` saying what it shows."""
    found = {(result["name"], *_size(result)): cell(result) for result in results}
    names, columns = dict.fromkeys(result["name"] for result in results), sizes(results)
    rows = [[f"**{name}**", *(found.get((name, *size), NONE) for size in columns)] for name in names]
    return [Column(f"{model}, batch {batch}") for model, batch in columns], rows


def _size(result: Result) -> tuple[str, int]:
    return result["model"], result["batch"]


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def _elements(count: int) -> str:
    for power, unit in ((20, "Mi"), (10, "Ki")):
        if count >= 1 << power:
            return f"{count / (1 << power):g} {unit}"
    return str(count)


def _share(nanoseconds: float | None, rate: float | None) -> str:
    if nanoseconds is None:
        return NONE
    return f"{100 * BYTES_MOVED / nanoseconds * 1e9 / rate:.0f} %" if rate else NOT_MEASURED
