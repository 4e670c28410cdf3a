"""What GPUs can do, from the records of `make gpu`: a sentence for the README, and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from altgrad.benchmark.speed_tables import memory_table, optimizers_table, steps_table
from altgrad.reporting.document import Block, Bullets, Column, Table, Text
from altgrad.reporting.tables import words
from altgrad.reporting.wording import NONE, number, whole

BASELINE = "bf16"
NOT_MEASURED = "**On a GPU, how fast**: not measured. `make gpu` measures it in ten minutes."

Result = dict[str, Any]


def gpu_sentence(benches: list[Result]) -> str:
    """Return what the README says: a step beside bf16, a quantizer beside a copy, and runs an hour, for each GPU."""
    return " ".join(map(_sentence, benches)) or NOT_MEASURED


def gpu_blocks(bench: Result) -> list[Block]:
    """Return what one GPU's record says, the checks first."""
    blocks: list[Block] = [Text(f"**{bench['device']}** ({_source(bench)}).")]
    shown: list[tuple[str, Callable[[Result], Table]]] = [
        *TABLES.items(), ("steps", steps_table), ("memory", memory_table), ("optimizers", optimizers_table),
    ]  # fmt: skip
    blocks += [table(bench) for part, table in shown if bench.get(part)]
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


def checks_table(bench: Result) -> Table:
    """Tests that hold the GPU against the CPU: how many passed."""
    rows = [
        [f"`{row['name']}`", whole(row["passed"]), ", ".join(row["failed"]) or NONE, number(row["took_s"], 0)]
        for row in bench["checks"]
    ]
    note = "Tests of `tests/gpu`: bits of operands, scales and random numbers, whole runs, steps of every optimizer."
    return Table([words("checked"), Column("passed"), words("failed"), Column("s")], rows, note)


def operands_table(bench: Result) -> Table:
    """Operands of products: the rate at which they are made, and its share of a copy's."""
    rows = []
    for row in bench["operands"]:
        if "absent" in row:
            rows.append([f"**{row['name']}**", row["absent"], NONE, NONE, NONE])
            continue
        low, high = row["over_copy_quartiles"]
        rows.append([
            f"**{row['name']}**", number(row["call_ms"], 3), whole(row["gb_per_s"]), f"{row['over_copy']:.2f}",
            f"{low:.2f} to {high:.2f}",
        ])  # fmt: skip
    columns = [words("operand"), Column("ms"), Column("GB/s"), Column("of a copy"), Column("quartiles")]
    elements = bench["operands"][0]["elements"]
    note = (
        f"A bfloat16 tensor of {whole(elements)} elements, quantized and written in bfloat16, or in float8 where it "
        "says so; compiled. Bytes: the tensor read once and the values written once. Of a copy: median over rounds of "
        "the rate over that of a copy in the same round."
    )
    return Table(columns, rows, note)


def at_once_table(bench: Result) -> Table:
    """Runs an hour by how many share the GPU."""
    rows = [
        [whole(row["jobs"]), whole(row["runs_per_hour"]), _range(row), number(row["first_s"], 0)]
        for row in sorted(bench["at_once"], key=lambda row: row["jobs"])
    ]
    note = (
        f"Runs of `{bench['at_once'][0]['model']}`, trained and diagnosed, so many at a time on the one GPU, from when "
        "the first of each process has ended; first: seconds until then."
    )
    return Table([*map(Column, ("at a time", "runs an hour", "slowest to fastest round", "first, s"))], rows, note)


def _range(row: Result) -> str:
    return " to ".join(map(whole, row["runs_per_hour_range"]))


def parts_table(bench: Result) -> Table:
    """What a run of each model size is made of."""
    names = {
        "step_s": "step, s", "step_p90_s": "step (p90), s", "evaluate_s": "evaluation, s",
        "observe_s": "look inside, s", "setup_s": "set-up, s", "diagnose_s": "diagnosis, s", "first_s": "first run, s",
    }  # fmt: skip
    rows = [
        [f"`{row['name']}`", f"{row['parameters'] / 1e6:.3g}", whole(row["tokens_per_s"]),
         *(number(row[key], 4 if key.startswith("step") else 1) for key in names)]
        for row in bench["parts_of_runs"]
    ]  # fmt: skip
    first = bench["parts_of_runs"][0]
    note = (
        f"Runs of {first['steps']} steps in {first['format']}, the second of two in one process; first run: with "
        "compiling. `make estimate` takes its seconds from here."
    )
    heads = [words("model"), Column("M parameters"), Column("tokens/s"), *map(Column, names.values())]
    return Table(heads, rows, note)


#: Tables of what `make gpu` alone measures.
TABLES: dict[str, Callable[[Result], Table]] = {
    "checks": checks_table,
    "operands": operands_table,
    "at_once": at_once_table,
    "parts_of_runs": parts_table,
}
