"""Results as lines for the terminal, while a session runs."""

from __future__ import annotations

from typing import Any

NAME = 34
COLUMNS = {  # part: what follows the name, as (head, key of the result, format)
    "steps": (("ms per step", "step_ms", ".1f"), ("over bf16", "over_bf16", ".3f"), ("tokens/s", "tokens_per_s", ",")),
    "memory": (("peak MB", "peak_mb", ".0f"), ("at rest MB", "state_mb", ".0f")),
    "compile": (("cold s", "cold_s", ".1f"), ("warm s", "warm_s", ".1f")),
    "optimizers": (
        ("ms per step", "step_ms", ".2f"),
        ("over AdamW", "over_adamw", ".2f"),
        ("peak MB", "peak_mb", ".0f"),
    ),
    "quantizers": (("ns per element", "median_ns_per_element", ".3g"),),
    "pipeline": (("first s", "first_s", ".1f"), ("per cell s", "per_cell_s", ".2f"), ("no-op s", "no_op_s", ".1f")),
    "study": (
        ("cells an hour", "cells_per_hour", ".0f"),
        ("core s a cell", "cell_s", ".1f"),
        ("steps s", "steps_s", ".1f"),
    ),
}


def table(part: str, results: list[dict[str, Any]]) -> str:
    """Return the results of one size: a head line that names it, then a line each."""
    columns = COLUMNS[part]
    lines = [f"{part}: {_size(results[0])}".ljust(NAME) + "".join(f"{head:>16}" for head, _, _ in columns)]
    for result in results:
        cells = (_cell(result, key, style) for _, key, style in columns)
        lines.append(result.get("name", "make repro").ljust(NAME) + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _size(result: dict[str, Any]) -> str:
    if "batch" not in result and "model" in result:
        return result["model"]
    if "model" in result:
        return f"{result['model']}, batch {result['batch']}"
    return f"{result['elements']:,} elements" if "elements" in result else f"{result['cells']} cells"


def _cell(result: dict[str, Any], key: str, style: str) -> str:
    value = result.get(key)
    return result.get("absent", "not measured") if value is None else format(value, style)
