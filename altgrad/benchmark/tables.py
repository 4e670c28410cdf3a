"""Results as lines for the terminal, while a session runs, and which of them belong together."""

from __future__ import annotations

from typing import Any, NamedTuple

NAME = 34


class Rows(NamedTuple):
    """The results of a part: rows with a ``name``, measured together for one ``size``.

    ``group`` are the keys that tell which rows a new measurement replaces: those measured together, or a ratio would
    join two sessions. ``columns`` follow the name: head, key of the row, format.
    """

    size: str
    group: tuple[str, ...]
    columns: tuple[tuple[str, str, str], ...]


OF_A_STEP = "{model}, batch {batch}"
ROWS = {
    "steps": Rows(
        OF_A_STEP,
        ("model", "batch"),
        (("ms per step", "step_ms", ".1f"), ("over bf16", "over_bf16", ".3f"), ("tokens/s", "tokens_per_s", ",")),
    ),
    "memory": Rows(
        OF_A_STEP,
        ("model", "batch"),
        (("peak MB", "peak_mb", ".0f"), ("at rest MB", "state_mb", ".0f")),
    ),
    "compile": Rows(
        OF_A_STEP,
        ("model",),
        (("cold s", "cold_s", ".1f"), ("warm s", "warm_s", ".1f")),
    ),
    "optimizers": Rows(
        "{model}",
        ("model", "name"),
        (("ms per step", "step_ms", ".2f"), ("over AdamW", "over_adamw", ".2f"), ("peak MB", "peak_mb", ".0f")),
    ),
    "quantizers": Rows(
        "{elements:,} elements",
        ("elements",),
        (("ns per element", "median_ns_per_element", ".3g"),),
    ),
    "checks": Rows("tests", (), (("passed", "passed", "d"), ("skipped", "skipped", "d"), ("failed", "failed", ""))),
    "operands": Rows(
        "{elements:,} elements",
        ("elements",),
        (("ms", "call_ms", ".3f"), ("GB/s", "gb_per_s", ",.0f"), ("of a copy", "over_copy", ".0%")),
    ),
    "at_once": Rows("{model}", ("model",), (("runs an hour", "runs_per_hour", ",d"), ("first s", "first_s", ".0f"))),
    "parts_of_runs": Rows(
        "a run",
        (),
        (("tokens/s", "tokens_per_s", ","), ("step s", "step_s", ".4f"), ("first s", "first_s", ".0f")),
    ),
    "pipeline": Rows(
        "{cells} cells",
        ("cells",),
        (("first s", "first_s", ".1f"), ("per cell s", "per_cell_s", ".2f"), ("no-op s", "no_op_s", ".1f")),
    ),
    "monitors": Rows(
        "{model}",
        ("model",),
        (("ms per step", "step_ms", ".1f"), ("watched ms", "watched_ms", ".1f"), ("share of time", "share", ".1%")),
    ),
    "study": Rows(
        "{cells} cells of {model}",
        ("model",),
        (("cells an hour", "cells_per_hour", ".0f"), ("a cell s", "cell_s", ".1f"), ("its steps s", "steps_s", ".1f")),
    ),
}


def lines(part: str, results: list[dict[str, Any]]) -> list[str]:
    """Return a line for each result by itself: its name, then head and value of each column."""
    columns = ROWS[part].columns
    of_each = [[f"{head} {_cell(result, key, style)}" for head, key, style in columns] for result in results]
    return [f"{result['name']}: {', '.join(found)}" for result, found in zip(results, of_each, strict=True)]


def table(part: str, results: list[dict[str, Any]]) -> str:
    """Return the results of one size: a head line that names it, then a line each."""
    rows = ROWS[part]
    head = f"{part}: {rows.size.format(**results[0])}"
    lines = [head.ljust(NAME) + "".join(f"{head:>16}" for head, _, _ in rows.columns)]
    for result in results:
        cells = (_cell(result, key, style) for _, key, style in rows.columns)
        lines.append(result.get("name", "make repro").ljust(NAME) + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _cell(result: dict[str, Any], key: str, style: str) -> str:
    value = result.get(key)
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return result.get("absent", "not measured") if value is None else format(value, style)
