"""How far formats differ when a trained model is quantized, and when models are trained so.

Kuzmin et al. 2022 (arXiv:2208.09225) find that outliers call for exponent bits in the first case, and that in the
second the differences between formats nearly vanish. The table is that of ``python -m altgrad.diagnostics ptq``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.paired import interval, with_interval
from altgrad.reporting.wording import joined, signed

AS_TRAINED = "as trained"  # the entry of the table for a model whose weights are left as they are
NEAR = 1e-4  # nats per token, within which a table's loss is that of the study's cell


class Spreads(NamedTuple):
    """Largest minus smallest loss over the same ``formats`` (nats per token), a number per trained model."""

    formats: tuple[str, ...]
    after: np.ndarray
    trained: np.ndarray


def spreads(table: pd.DataFrame) -> Spreads | None:
    """Return the spreads over the formats that every cell of ``table`` has both losses of; ``None`` for fewer than two.

    ``table`` has columns ``cell``, ``format``, ``after`` and ``trained_so``, NaN where a format was not trained.
    """
    both = table.dropna(subset=["after", "trained_so"])
    counts = both.groupby("format", sort=False)["cell"].nunique()
    formats = tuple(counts.index[counts == table["cell"].nunique()])
    if len(formats) < 2:
        return None
    losses = both[both["format"].isin(formats)].groupby("cell", sort=False)[["after", "trained_so"]]
    ranges = losses.max() - losses.min()
    return Spreads(formats, ranges["after"].to_numpy(), ranges["trained_so"].to_numpy())


def load_spreads(file: Path, study: Study) -> Spreads | None:
    """Return the spreads of a kept table beside this study's own cells; ``None`` where it is not of these.

    A model of the table counts if the study has a cell of its name with its loss.
    """
    if not file.is_file():
        return None
    table = pd.read_csv(file)
    cells = study.cells[study.cells["status"] == COMPLETED]
    own = table[table["format"] == AS_TRAINED].set_index("cell")["after"]
    known = [key for key in own.index if key in cells.index and abs(own[key] - cells["val_loss"][key]) < NEAR]
    losses = cells.set_index(["format", "optimizer", "seed", "lr_scale"])["val_loss"]
    table = table[table["cell"].isin(known)]
    beside = [
        losses.get((row.format, *cells.loc[row.cell, ["optimizer", "seed", "lr_scale"]])) for row in table.itertuples()
    ]
    return spreads(table.assign(trained_so=np.array(beside, dtype="float64"))) if len(table) else None


def sentence(found: Spreads) -> str:
    """Say how far formats differ after training and when trained so, and whether the second is less."""
    over = f"Over {joined(found.formats)}, largest minus smallest loss is"
    if len(found.after) < 2:
        after, trained = (signed(values[0], 4) for values in (found.after, found.trained))
        return f"{over} {after} where a trained model is quantized, and {trained} where models are trained so."
    _, low, high = interval(found.after - found.trained)
    verdict = (
        "less when trained so" if low > 0 else "more when trained so" if high < 0 else "the two are not told apart"
    )
    return (
        f"{over} {with_interval(found.after)} where a trained model is quantized, and {with_interval(found.trained)} "
        f"where models are trained so; difference {with_interval(found.after - found.trained)}: {verdict}."
    )
