"""Reads and writes each machine's record, reports/bench/<machine>.json, and makes the page of all records.

In a record, ``sessions`` maps a session's number to its command, commit and versions, and every result has its
``session``. A new result replaces an earlier result with the same `IDENTITY`; all others stay. A session without
results is dropped.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from altgrad.common.files import read_json, write_record, write_text
from altgrad.reporting.markdown import (
    NONE,
    Block,
    Column,
    Table,
    integer,
    number,
    significant,
    to_markdown,
    words,
)

MACHINE = ("device", "on_gpu", "threads", "processor", "vector_instructions")  # what identifies a machine
SAME = ("commit", "torch", "driver", "triton")  # a session skips items measured by one with equal values
IDENTITY = ("model", "batch", "elements", "name")  # a result replaces an earlier one of its part with equal values
BENCH = Path("reports/bench")
LEAD = "Step times beside bf16, and what else was measured. A row is of the session that measured it last."
BASELINE = "bf16"  # the contestant beside which all others are timed
NOT_MEASURED = "not measured"
BYTES = {
    "masters": "masters", "weights": "weights", "gradients": "grads", "m": "m", "v": "v", "other": "other_state",
    "all": "per_parameter",
}  # fmt: skip

Result = dict[str, Any]
Cell = Callable[[Result], str]


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


def write_page(root: Path) -> Path:
    """Write ``root/reports/bench/README.md`` from the records beside it, one per machine; return its path."""
    page = root / BENCH / "README.md"
    benches = [read_json(path) for path in sorted(page.parent.glob("*.json"))]
    blocks = [LEAD, *(block for bench in benches for block in machine_blocks(bench))]
    write_text(page, f"# What machines can do\n\n{to_markdown(blocks)}\n")
    return page


def machine_blocks(bench: Result) -> list[Block]:
    """Return a machine's section of the page: its limits, its tables, and the items that failed."""
    lead = f"**{bench['device']}, {bench['threads']} threads** ({_source(bench)}). {_limits(bench)}"
    failed = [f"{name}: {item['failed']}" for name, item in bench.get("items", {}).items() if item["failed"]]
    tables = [table(bench) for part, table in TABLES.items() if bench.get(part)]
    return [lead, *tables, *[f"Not measured: {'; '.join(failed)}."] * bool(failed)]


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


def _source(bench: Result) -> str:
    last = bench["sessions"][max(bench["sessions"], key=int)]
    named = {"driver": last.get("driver"), "torch": last.get("torch"), "commit": (last.get("commit") or "")[:10]}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value)


def as_text(part: str, results: list[Result], bench: Result) -> str:
    """Return ``results`` of a part as text for the terminal; the record ``bench`` has the limits for shares."""
    table = TABLES[part]({part: results, "limits": bench.get("limits", {})})
    rows = [[column.head for column in table.columns], *table.rows]
    plain = [[cell.replace("*", "").replace("`", "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in plain)
    return "\n".join([f"{part}:", *(f"  {line.rstrip()}" for line in lines)])


def operands_table(bench: Result) -> Table:
    """Return the table of operands: milliseconds, GB/s, and GB/s over a copy's."""

    def known(cell: Cell) -> Cell:
        return lambda row: NONE if "absent" in row else cell(row)

    note = (
        f"A bfloat16 tensor of {integer(bench['operands'][0]['elements'])} elements, quantized and written in "
        "bfloat16, or in float8 where the name says so; compiled. Bytes: the tensor read once and the values written "
        "once. Of a copy: the rate over that of a copy in the same round, median over rounds."
    )
    return _table(
        bench["operands"], note, (words("operand"), _strong),
        (Column("ms"), lambda row: row.get("absent") or number(row["call_ms"], 3)),
        (Column("GB/s"), known(_whole("gb_per_s"))), (Column("of a copy"), known(_number("over_copy", 2))),
        (Column("quartiles"), known(_quartiles("over_copy"))),
    )  # fmt: skip


def steps_table(bench: Result) -> Table:
    """Return the table of training steps: time over the bf16 step's, a column per model and batch."""
    note = (
        "Time of a compiled training step over that of a bf16 step in the same round, median over rounds; in brackets "
        "its milliseconds. Unless the name says otherwise, weights and inputs are quantized in the format, gradients "
        "in E5M2, with a scale per tensor and step. Share: operations of the linear layers over the bf16 limit above."
    )
    columns, rows = _by_size(bench["steps"], lambda step: f"{step['over_bf16']:.2f} ({_ms(step)})")
    baseline = {_size(step): step["matmul_operations_per_s"] for step in bench["steps"] if step["name"] == BASELINE}
    if baseline:
        rate = bench.get("limits", {}).get("bf16_gemm_operations_per_s")
        shares = (
            f"{100 * baseline[size] / rate:.0f} %" if rate and size in baseline else NOT_MEASURED
            for size in sizes(bench["steps"])
        )
        rows.append(["bf16 step, share of the limit", *shares])
    return Table([words("step"), *columns], rows, note)


def memory_table(bench: Result) -> Table:
    """Return the table of the contestants' peak memory, a column per model and batch."""
    peaks = {(_size(result), result["name"]): result["peak_mb"] for result in bench["memory"]}

    def cell(result: Result) -> str:
        base = peaks.get((_size(result), BASELINE))
        return _mb(result["peak_mb"]) + (f" ({result['peak_mb'] / base:.2f})" if base and result["peak_mb"] else "")

    columns, rows = _by_size(bench["memory"], cell)
    note = (
        "MB (10^6 bytes) at the peak of three warm steps, and in brackets over that of bf16: parameters, optimizer "
        "state, gradients, activations and quantized copies. On a CPU, what is held between steps plus the growth of "
        "the resident set; on a GPU, what torch has allocated."
    )
    return Table([words("peak MB"), *columns], rows, note)


def at_once_table(bench: Result) -> Table:
    """Return the table of runs per hour, a row per number of runs at a time."""
    note = (
        f"Runs of `{bench['at_once'][0]['model']}` that are trained and diagnosed in an hour, several at a time. The "
        "first run of each process is not counted; first: seconds until the earliest of them ended."
    )
    return _table(
        sorted(bench["at_once"], key=lambda row: row["jobs"]), note, (Column("at a time"), _whole("jobs")),
        (Column("runs an hour"), _whole("runs_per_hour")),
        (Column("slowest to fastest round"), lambda row: " to ".join(map(integer, row["runs_per_hour_range"]))),
        (Column("first, s"), _number("first_s", 0)),
    )  # fmt: skip


def parts_table(bench: Result) -> Table:
    """Return the table of the seconds of a run's parts, a row per model."""
    names = {
        "step_s": "step, s", "step_p90_s": "step (p90), s", "evaluate_s": "evaluation, s",
        "observe_s": "look inside, s", "setup_s": "set-up, s", "diagnose_s": "diagnosis, s", "first_s": "first run, s",
    }  # fmt: skip
    first = bench["parts_of_runs"][0]
    note = (
        f"Runs of {first['steps']} steps in {first['format']}, the second of two in one process. The first run "
        "includes compiling. `make estimate` takes its seconds from this table."
    )
    return _table(
        bench["parts_of_runs"], note, (words("model"), _code),
        (Column("M parameters"), lambda row: f"{row['parameters'] / 1e6:.3g}"),
        (Column("tokens/s"), _whole("tokens_per_s")),
        *((Column(name), _number(key, 4 if key.startswith("step") else 1)) for key, name in names.items()),
    )  # fmt: skip


def optimizers_table(bench: Result) -> Table:
    """Return the table of optimizers: step time over that of torch's fused AdamW, and memory."""
    rows, first = bench["optimizers"], bench["optimizers"][0]
    note = (
        "Time of the optimizer's step alone over that of torch's fused AdamW in the same round, median over rounds. "
        "The optimizer is told the norm of the gradients, as in training. Weights: the "
        f"{significant(first['parameters'] / 1e6)} M parameters of `{first['model']}`, in {first['format']}. "
        "State: the optimizer's tensors. Peak: state and all else that a step takes, without weights and gradients."
    )
    if has_bytes := any("bytes_m" in row for row in rows):  # older records have none
        note += (
            " B: bytes per parameter, of weights in full precision that products quantize anew (masters), other "
            "weights, gradients, both moments with their scales, other state, and all of these."
        )
    rules = []  # on a GPU, of optimizers that have a kernel
    if any("over_rule" in row for row in rows):
        note += " Over the rule: the kernel's time over that of the rule as torch compiles it."
        rules = [(Column("over the rule"), lambda row: number(row.get("over_rule"), 2))]
    return _table(
        rows, note, (words("arm"), _strong), (Column("over AdamW"), _number("over_adamw", 2)),
        (Column("quartiles"), _quartiles("over_adamw")), *rules, (Column("step"), _ms),
        (Column("state MB"), lambda row: _mb(row["state_mb"])), (Column("peak MB"), lambda row: _mb(row["peak_mb"])),
        *((Column(f"{name}, B"), _bytes(f"bytes_{key}")) for name, key in (BYTES if has_bytes else {}).items()),
    )  # fmt: skip


#: The table of each part, in the page's order.
TABLES: dict[str, Callable[[Result], Table]] = {
    "operands": operands_table, "steps": steps_table, "memory": memory_table, "at_once": at_once_table,
    "parts_of_runs": parts_table, "optimizers": optimizers_table,
}  # fmt: skip


def _table(results: Iterable[Result], note: str, *columns: tuple[Column, Cell]) -> Table:
    """Return a table with a row per result; ``columns`` pairs each column with the function that writes its cells."""
    return Table([column for column, _ in columns], [[cell(row) for _, cell in columns] for row in results], note)


def _strong(row: Result) -> str:
    return f"**{row['name']}**"


def _code(row: Result) -> str:
    return f"`{row['name']}`"


def _ms(row: Result) -> str:
    return f"{row['step_ms']:.0f} ms" if row["step_ms"] >= 10 else f"{row['step_ms']:.1f} ms"


def _mb(value: float | None) -> str:
    return NOT_MEASURED if value is None else integer(round(value))


def _whole(key: str) -> Cell:
    return lambda row: integer(row[key])


def _number(key: str, digits: int) -> Cell:
    return lambda row: number(row[key], digits)


def _bytes(key: str) -> Cell:
    return lambda row: number(row[key], 2) if key in row else NOT_MEASURED


def _quartiles(key: str) -> Cell:
    return lambda row: " to ".join(f"{end:.2f}" for end in row[f"{key}_quartiles"])


def _by_size(results: list[Result], cell: Cell) -> tuple[list[Column], list[list[str]]]:
    """Return a column per model and batch, and a row per contestant: its name, then ``cell(result)`` per column."""
    texts = {(result["name"], *_size(result)): cell(result) for result in results}
    names, columns = dict.fromkeys(result["name"] for result in results), sizes(results)
    rows = [[f"**{name}**", *(texts.get((name, *size), NONE) for size in columns)] for name in names]
    return [Column(f"{model}, batch {batch}") for model, batch in columns], rows


def sizes(results: list[Result]) -> list[tuple[str, int]]:
    """Return each (model, batch) in ``results``, sorted by the model's width, if given, then by batch."""
    models = {result["model"]: result.get("width", 0) for result in results}
    rank = {model: i for i, model in enumerate(sorted(models, key=models.__getitem__))}
    return sorted({_size(result) for result in results}, key=lambda size: (rank[size[0]], size[1]))


def _size(result: Result) -> tuple[str, int]:
    return result["model"], result["batch"]
