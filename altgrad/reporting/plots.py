"""Tidy tables for DVC's own plots, which compare experiments as well as the formats of one workspace.

Every table names format, optimizer, seed and lr_scale in its first columns, so that one plot
definition serves ``dvc plots show`` (many formats, one revision) and ``dvc plots diff`` (many
revisions, perhaps one format each). The Vega-Lite templates in ``.dvc/plots`` read these columns.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from altgrad.common.files import replacing
from altgrad.reporting.load import COMPLETED, IDENTITY, Study
from altgrad.reporting.select import late

PRIMARY = "primary"  # the final validation loss, or the metric of a task that names another
LAYER_ROLES = ("weight", "input", "grad")
LAYER_METRICS = ["sqnr_db", "underflow_frac", "overflow_frac"]


def training_table(study: Study) -> pd.DataFrame:
    """A row per logged step of every run: training loss, gradient norm, clipping, learning rate."""
    columns = [*IDENTITY, "outcome", "step", "tokens", "lr", "train_loss", "grad_norm", "clipped_frac"]
    unit = study.measure.unit if study.measure.in_nats else "nats per label"
    return _with_outcome(study, study.history.dropna(subset="train_loss"))[columns].assign(
        measure="training loss", unit=unit
    )


def validation_table(study: Study) -> pd.DataFrame:
    """A row per evaluation: what is compared, and its difference to the baseline's of the same seed and step."""
    history = study.history.assign(**{PRIMARY: study.history[study.measure.on_validation]}).dropna(subset=PRIMARY)
    table = _with_outcome(study, history)[[*IDENTITY, "outcome", "step", PRIMARY]]
    keys = ["optimizer", "seed", "lr_scale", "step"]
    baseline = table[table["format"] == study.baseline].set_index(keys)[PRIMARY]
    table["delta_to_baseline"] = table[PRIMARY].to_numpy() - baseline.reindex(
        pd.MultiIndex.from_frame(table[keys])
    ).to_numpy(dtype="float64")
    return table.assign(measure=f"validation {study.measure.noun}", unit=study.measure.unit, baseline=study.baseline)


def results_table(study: Study) -> pd.DataFrame:
    """A row per completed cell: what is compared."""
    measure = study.measure
    completed = study.of_status(COMPLETED).rename(columns={measure.column: PRIMARY})
    of = "test" if measure.column.startswith("test_") else "validation"
    return completed[[*IDENTITY, PRIMARY]].reset_index(drop=True).assign(
        measure=f"{of} {measure.noun}", unit=measure.unit, better="higher" if measure.higher_is_better else "lower"
    )


def layers_table(study: Study) -> pd.DataFrame:
    """A row per cell, layer and quantized role: each health metric's mean over the second half of the run."""
    rows = late(study.monitors[study.monitors["role"].isin(LAYER_ROLES)])
    rows = rows[rows["metric"].isin(LAYER_METRICS)]
    table = rows.pivot_table(index=[*IDENTITY, "layer", "role"], columns="metric", values="value", sort=False)
    return table.reindex(columns=LAYER_METRICS).rename_axis(columns=None).reset_index()


def _with_outcome(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the ``outcome`` of their run, so that a plot can keep diverged runs out of a mean."""
    outcomes = study.cells.rename(columns={"status": "outcome"})[[*IDENTITY, "outcome"]]
    return rows.merge(outcomes, on=IDENTITY, how="left")


TABLES = {
    "training": training_table,
    "validation": validation_table,
    "results": results_table,
    "layers": layers_table,
}


def write_plots(study: Study, folder: Path) -> None:
    """Write each table as ``folder/<name>.csv``, absent values empty, numbers to seven digits."""
    for name, table in TABLES.items():
        with replacing(folder / f"{name}.csv") as path:
            table(study).to_csv(path, index=False, lineterminator="\n", float_format="%.7g")
