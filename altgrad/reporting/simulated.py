"""What the simulation says of a report like this one: how often chance alone gives it a significant result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from altgrad.reporting.load import Study


@dataclass(frozen=True)
class Rates:
    """The share of simulated null studies of ``formats`` x ``arms`` x ``seeds`` with a significant result."""

    formats: int
    arms: int
    seeds: int
    significant: float


def load_rates(file: Path, study: Study) -> Rates | None:
    """Return the rates of the simulated design that is most like ``study``; ``None`` without the table.

    The file is `make simulate`'s. Most like: nearest in seeds, then in the number of runs; of all noises the worst.
    """
    if not file.is_file():
        return None
    table = pd.read_csv(file)
    if table.empty:
        return None
    runs = len(study.formats) * len(study.optimizers)
    table["far"] = (table["seeds"] - len(study.seeds)).abs()
    table["unlike"] = (table["formats"] * table["arms"] - runs).abs()
    near = table[table["far"] == table["far"].min()]
    near = near[near["unlike"] == near["unlike"].min()]
    first = near.iloc[0]
    formats, arms, seeds = (int(first[name]) for name in ("formats", "arms", "seeds"))
    return Rates(formats, arms, seeds, float(near["false_significant"].max()))
