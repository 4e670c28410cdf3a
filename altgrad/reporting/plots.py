"""Tidy tables for DVC's own plots, which compare experiments as well as the formats of one workspace.

Every table names format, optimizer, seed and lr_scale in its first columns, so that one plot
definition serves ``dvc plots show`` (many formats, one revision) and ``dvc plots diff`` (many
revisions, perhaps one format each). The Vega-Lite templates in ``.dvc/plots`` read these columns.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from altgrad.config.files import replacing
from altgrad.reporting.load import COMPLETED, IDENTITY, Study
from altgrad.reporting.magnitudes import BINS_PER_BINADE, LOWEST, relative_histogram
from altgrad.reporting.runs import PRIMARY

LAYER_ROLES = ("weight", "input", "grad")
LAYER_METRICS = ["sqnr_db", "underflow_frac", "overflow_frac"]
BINADE = "rungs_2^"
#: The axes of the parallel coordinates, in their order.
MEASURES = ("final loss", "gradient norm", "overflow", "stall ratio", "stiffness entropy", "tokens/s")


def training_table(study: Study) -> pd.DataFrame:
    """A row per logged step of every run: training loss, gradient norm, clipping, learning rate."""
    columns = [*IDENTITY, "outcome", "step", "tokens", "lr", "train_loss", "grad_norm", "clipped_frac"]
    return _with_outcome(study, study.history.dropna(subset="train_loss"))[columns]


def validation_table(study: Study) -> pd.DataFrame:
    """A row per evaluation: validation loss, and its difference to the baseline's of the same seed and step."""
    table = _with_outcome(study, study.history.dropna(subset=PRIMARY))[[*IDENTITY, "outcome", "step", PRIMARY]]
    keys = ["optimizer", "seed", "lr_scale", "step"]
    baseline = table[table["format"] == study.baseline].set_index(keys)[PRIMARY]
    table["delta_to_baseline"] = table[PRIMARY].to_numpy() - baseline.reindex(
        pd.MultiIndex.from_frame(table[keys])
    ).to_numpy(dtype="float64")
    return table


def results_table(study: Study) -> pd.DataFrame:
    """A row per completed cell: its final validation loss."""
    completed = study.cells[study.cells["status"] == COMPLETED]
    return completed[[*IDENTITY, PRIMARY]].reset_index(drop=True)


def layers_table(study: Study) -> pd.DataFrame:
    """A row per cell, layer and quantized role: each health metric's mean over the second half of the run."""
    rows = _late(study.monitors[study.monitors["role"].isin(LAYER_ROLES)])
    rows = rows[rows["metric"].isin(LAYER_METRICS)]
    table = rows.pivot_table(index=[*IDENTITY, "layer", "role"], columns="metric", values="value", sort=False)
    return table.reindex(columns=LAYER_METRICS).rename_axis(columns=None).reset_index()


def binades_table(study: Study) -> pd.DataFrame:
    """A row per cell and binade of |w|: log2 of the rungs that a weight there moves in a step, in the second half.

    Empty where none moves. A weight near zero moves many rungs, one near the largest hardly any.
    """
    rows = _late(study.monitors[study.monitors["metric"].str.startswith(BINADE)])
    rows = rows.assign(binade=rows["metric"].str.removeprefix(BINADE).astype("int64"))
    means = rows.groupby([*IDENTITY, "binade"], sort=False)["value"].mean().reset_index()
    means["log2_rungs"] = np.log2(means["value"].where(means["value"] > 0))
    return _with_outcome(study, means)[[*IDENTITY, "outcome", "binade", "log2_rungs"]]


def usage_table(study: Study) -> pd.DataFrame:
    """A row per cell and binade of its format's number line: the percentage of weights whose codes lie there.

    Binade 0 is the one below the format's largest value, where a scale per tensor puts a layer's largest weight; every
    layer counts alike. A bin has as many codes as every other of the format's normal range.
    """
    rows = study.diagnosis[study.diagnosis["metric"] == "log2_magnitude"]
    amax = study.monitors[(study.monitors["role"] == "weight") & (study.monitors["metric"] == "amax")]
    amax = amax[amax["value"] > 0].sort_values("step", kind="stable").groupby([*IDENTITY, "layer"], sort=False)
    largest = amax["value"].last().sort_index()
    found = []
    for cell, of_cell in rows.groupby(IDENTITY, sort=False):
        if cell not in largest.index:
            continue
        of_layers = largest.loc[cell]
        of_layers.index = pd.MultiIndex.from_tuples([(cell[0], cell[2], layer) for layer in of_layers.index])
        shares = relative_histogram(of_cell, of_layers).reshape(-1, BINS_PER_BINADE).sum(axis=1)
        found += [(*cell, LOWEST + 1 + i, 100 * share) for i, share in enumerate(shares)]
    table = pd.DataFrame(found, columns=[*IDENTITY, "binade", "weights"])
    return _with_outcome(study, table)[[*IDENTITY, "outcome", "binade", "weights"]]


def measures_table(study: Study) -> pd.DataFrame:
    """A row per completed cell and one of `MEASURES`; those of gradients and monitors are means of the second half."""
    cells = study.cells[study.cells["status"] == COMPLETED].set_index(IDENTITY)
    monitors, summary = _late(study.monitors), study.summary
    overflow = monitors[(monitors["metric"] == "overflow_frac") & monitors["role"].isin(LAYER_ROLES)]
    values = (
        cells[PRIMARY],
        _late(study.history.dropna(subset="grad_norm")).groupby(IDENTITY)["grad_norm"].mean(),
        overflow.groupby(IDENTITY)["value"].mean(),
        monitors[monitors["metric"] == "stall_ratio"].groupby(IDENTITY)["value"].mean(),
        summary[summary["metric"] == "stiffness_entropy"].groupby(IDENTITY)["value"].mean(),
        cells["tokens_per_s"],
    )
    tables = [
        found.reindex(cells.index).rename("value").reset_index().assign(measure=name, place=place)
        for place, (name, found) in enumerate(zip(MEASURES, values, strict=True))
    ]
    return pd.concat(tables)[[*IDENTITY, "place", "measure", "value"]].dropna(subset="value")


def _late(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the second half of each run."""
    return rows[rows["step"] >= rows.groupby(IDENTITY)["step"].transform("max") / 2]


def _with_outcome(study: Study, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the ``outcome`` of their run, so that a plot can keep diverged runs out of a mean."""
    outcomes = study.cells.rename(columns={"status": "outcome"})[[*IDENTITY, "outcome"]]
    return rows.merge(outcomes, on=IDENTITY, how="left")


TABLES = {
    "training": training_table,
    "validation": validation_table,
    "results": results_table,
    "layers": layers_table,
    "binades": binades_table,
    "usage": usage_table,
    "measures": measures_table,
}


def write_plots(study: Study, folder: Path) -> None:
    """Write each table as ``folder/<name>.csv``, absent values empty, numbers to seven digits."""
    for name, table in TABLES.items():
        with replacing(folder / f"{name}.csv") as path:
            table(study).to_csv(path, index=False, lineterminator="\n", float_format="%.7g")
