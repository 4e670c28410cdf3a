"""A study in memory with the losses that a test gives it, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from altgrad.formats import get_format
from altgrad.reporting.load import COLUMNS, COMPLETED, DIVERGED, IDENTITY, NUMBERS, TEXTS, Study
from altgrad.reporting.markdown import Table

ADAMW = {"base": "adamw"}
STIFF = {"base": "adamw", "stiffness": "ulp"}
FORMATS = ["E5M2", "E4M3", "E3M4", "E2M5", "E1M6"]

DECAY = {"decay": 3e-4, "plain_decay": 1.2e-3}
TRAIN = {"steps": 10, "warmup": 0.1, "final_lr": 0.1}

Losses = Mapping[tuple[str, str] | tuple[str, str, float], Sequence[float | None]]


def study_of(losses: Losses, arms: Mapping[str, dict[str, Any]], baseline: str = "bf16") -> Study:
    """Return a study; ``losses`` by (entry, arm) or (entry, arm, rate), one per seed, None for a diverged cell.

    Entry ``bf16`` quantizes nothing, and ``virtual.F`` has F's geometry alone.
    """
    runs = {(*run, 1)[:3]: values for run, values in losses.items()}
    entries, rates = (list(dict.fromkeys(run[i] for run in runs)) for i in (0, 2))
    rows, resolved = [], {}
    for entry, arm, (seed, _), rate in itertools.product(entries, arms, enumerate(next(iter(runs.values()))), rates):
        key, loss = f"{entry}-{arm}-{seed}-{rate}", runs[entry, arm, rate][seed]
        spec = {"format": entry.removeprefix("virtual."), "virtual": entry.startswith("virtual.")}
        products = None if spec["virtual"] else spec
        rules = [] if entry == "bf16" else [{"layers": "*", "weight": spec, "input": products, "grad": products}]
        resolved[key] = {
            "format": entry, "optimizer": arm, "arm": DECAY | arms[arm], "rules": rules, "train": TRAIN,
        }  # fmt: skip
        rows.append({
            "key": key, "format": entry, "optimizer": arm, "seed": seed, "lr_scale": rate, "val_loss": loss,
            "train_loss": loss, "status": DIVERGED if loss is None else COMPLETED, "steps": 10, "planned_steps": 10,
            "parameters": 1e6, "tokens": 1e6, "peak_lr": arms[arm].get("lr", 1.0) * rate,
        })  # fmt: skip
    cells = pd.DataFrame(rows).set_index("key").reindex(columns=[*IDENTITY, *TEXTS, *NUMBERS])
    cells[NUMBERS] = cells[NUMBERS].astype("float64")
    empty = {name: pd.DataFrame(columns=[*IDENTITY, *columns]) for name, columns in COLUMNS.items()}
    return Study({"grid": {"baseline": baseline}}, {"corpus": "made"}, resolved, cells, timing={}, **empty)


def with_formats(study: Study) -> Study:
    """Return the study with what its cells say of their formats."""
    for cell in study.resolved.values():
        name = cell["format"].removeprefix("virtual.")
        cell["formats"] = {name: asdict(get_format(name))} if name != "bf16" else {}
    return study


def noisy(level: float, seeds: int = 5, key: int = 0, sd: float = 0.01) -> np.ndarray:
    """Return losses around ``level`` with a shift per seed that all runs share and noise of their own."""
    shift = 0.03 * np.random.default_rng(99).standard_normal(seeds)
    return level + shift + sd * np.random.default_rng(key).standard_normal(seeds)


def losses_of(arms: dict, gain: dict | None = None, formats: list[str] = FORMATS, **options) -> dict:
    """Return noisy losses of every entry and arm, lowered by ``gain`` of (entry, arm)."""
    keys = {pair: i for i, pair in enumerate((entry, arm) for entry in formats for arm in arms)}
    return {pair: noisy(3.5 - (gain or {}).get(pair, 0.0), key=i, **options) for pair, i in keys.items()}


def texts(table: Table | None) -> list[list[str]]:
    """Return the rows of a table."""
    assert table is not None
    return [list(row) for row in table.rows]
