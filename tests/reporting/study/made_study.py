"""A study of a few runs whose losses are made up, in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from ruamel.yaml import YAML

from altgrad.reporting.study.runs import AFTER, COLUMNS

Losses = dict[tuple[str, str, str], np.ndarray]  # by experiment, format and optimizer, one for each seed


def rows(losses: Losses, lr_scale: float = 1) -> pd.DataFrame:
    """Return the table of runs with these losses, NaN for one that diverged."""
    return pd.DataFrame([
        {"experiment": experiment, "format": fmt, "optimizer": optimizer, "seed": seed, "lr_scale": lr_scale,
         "val_loss": loss, "status": "ok" if np.isfinite(loss) else "diverged", "steps": 200, "tokens": 204800,
         "parameters": 168256, "machine": "AMD EPYC bf16", "torch": "2.13.0", "commit": "abc", "purpose": "test"}
        for (experiment, fmt, optimizer), of_run in losses.items()
        for seed, loss in enumerate(of_run)
    ], columns=COLUMNS)  # fmt: skip


def write_study(root: Path, table: pd.DataFrame, **questions: dict[str, Any]) -> Path:
    """Write a study into ``root/reports/study`` and return it; a question has what it needs unless it is given."""
    study = root / "reports/study"
    (study / "results").mkdir(parents=True)
    table.to_csv(study / "results/runs.csv", index=False)
    pd.DataFrame(columns=AFTER).to_csv(study / "results/after_training.csv", index=False)
    (study / "ABOUT.md").write_text("# Results\n")
    for name, content in questions.items():
        with open(study / f"{name}.yaml", "w") as file:
            YAML().dump({"question": "Is it so?", "answer": "Yes.", "runs": {"one": {}}} | content, file)
    return study
