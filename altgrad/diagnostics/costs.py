"""What formats cost in a finished grid, and what the baseline's cells predict that they cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from altgrad.config import Cell, UserError
from altgrad.config.files import read_json
from altgrad.diagnostics.predictors import PREDICTORS, predictions
from altgrad.diagnostics.probed import probe
from altgrad.diagnostics.ptq import UNQUANTIZED, losses, trained
from altgrad.diagnostics.what_if import SPLITS, what_if


class Costs(NamedTuple):
    """Costs in nats per token above the unquantized loss, and predictions by `PREDICTORS`: (seeds, formats) each.

    ``formats`` were trained with every one of the seeds; ``all_formats`` are quantized to after training.
    """

    formats: list[str]
    trained: np.ndarray
    predicted_trained: dict[str, np.ndarray]
    all_formats: list[str]
    after: np.ndarray
    predicted: dict[str, np.ndarray]


def costs_of(data: Path, arm: str, baseline: str) -> Costs:
    """Return the costs of an arm's formats at learning rate scale 1, a row for each finished seed of ``baseline``.

    Raises :class:`UserError` where fewer than three formats were trained with all of the baseline's seeds.
    """
    cells = _finished(data, arm, baseline)
    so, after, tables = [], [], []
    for cell in cells:
        run = data / "runs" / cell.key
        reference = read_json(run / "metrics.json")["val_loss"]
        so.append({name: loss - reference for name, loss in trained(data, cell, SPLITS).items()})
        found = losses(cell, run, data / "tokens")
        after.append({name: found[name] - found[UNQUANTIZED] for name in SPLITS})
        tables.append(_predicted(data, cell, SPLITS))
    common = [name for name in SPLITS if all(name in costs for costs in so)]
    if len(common) < 3:
        raise UserError(
            f"{data} has {len(common)} formats that {arm} finished with every seed of {baseline}; an order takes three"
        )
    return Costs(
        common, _array(so, common), _by_predictor(tables, common),
        list(SPLITS), _array(after, list(SPLITS)), _by_predictor(tables, list(SPLITS)),
    )  # fmt: skip


def measured(results: Path, arm: str, baseline: str) -> pd.Series:
    """Return what each format of a study's results.csv costs above ``baseline`` (nats per token, mean over seeds).

    Of ``arm`` at learning rate scale 1, and of formats alone: no recipe, no virtual twin. Raises :class:`UserError`
    for a file of another kind, and where fewer than three formats have the baseline's seeds.
    """
    if not results.is_file():
        raise UserError(f"{results}: there is no such file; a part of the study has a results.csv")
    table = pd.read_csv(results)
    absent = {"format", "optimizer", "seed", "lr_scale", "val_loss"} - set(table)
    if absent:
        raise UserError(f"{results} has no column {min(absent)}; a results.csv of this pipeline has")
    rows = table[(table.optimizer == arm) & (table.lr_scale == 1)]
    losses = rows.pivot_table(index="seed", columns="format", values="val_loss", sort=False, dropna=False)
    if baseline not in losses:
        raise UserError(f"{results} has no cell of {baseline} and {arm}")
    costs = losses.sub(losses[baseline], axis=0).loc[losses[baseline].notna()]
    found = costs[[name for name in costs if re.fullmatch(r"E\dM\d", name)]].dropna(axis=1).mean()
    if len(found) < 3:
        raise UserError(f"{results} has {len(found)} formats with every seed of {baseline}; an order takes three")
    return found


def predicted(data: Path, arm: str, baseline: str, formats: Sequence[str]) -> pd.DataFrame:
    """Return what `PREDICTORS` (columns) say of ``formats`` (rows), the mean over the baseline's finished cells.

    Raises :class:`UserError` where there are none.
    """
    tables = [_predicted(data, cell, formats) for cell in _finished(data, arm, baseline)]
    return sum(tables[1:], start=tables[0]) / len(tables)


def _finished(data: Path, arm: str, baseline: str) -> list[Cell]:
    keys = read_json(data / "grid" / "index.json")["cells"]
    cells = [Cell.read(data / "grid" / f"{key}.json") for key in keys if key.startswith(f"{baseline}-{arm}-")]
    cells = [cell for cell in cells if cell.lr_scale == 1 and (data / "runs" / cell.key / "metrics.json").is_file()]
    if not cells:
        raise UserError(f"{data} has no finished cell of {baseline} and {arm}; name another arm, or run `dvc repro`")
    torch.set_num_threads(cells[0].model.threads)  # as they trained
    return cells


def _predicted(data: Path, cell: Cell, formats: Sequence[str]) -> pd.DataFrame:
    layers = probe(cell, data / "runs" / cell.key, data / "tokens")
    return predictions(what_if(layers, formats, granularities=("tensor",), roundings=("nearest-even",)))


def _array(costs: list[dict[str, float]], formats: list[str]) -> np.ndarray:
    return np.array([[seed[name] for name in formats] for seed in costs])


def _by_predictor(tables: list[pd.DataFrame], formats: list[str]) -> dict[str, np.ndarray]:
    return {name: np.array([table.loc[formats, name] for table in tables], dtype=float) for name in PREDICTORS}
