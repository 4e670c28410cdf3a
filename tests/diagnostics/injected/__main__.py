"""Trains runs with an injected fault and healthy ones, and counts how often the first anomaly is the tensor with it.

    make injected

writes ``reports/first_anomaly``: ``README.md`` with the tables, ``table.csv`` with the same numbers, ``runs.csv`` with
a row per run and condition. Runs that the folder has are not trained again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from altgrad.common.errors import run_stage
from altgrad.common.files import replacing, write_text
from altgrad.reporting.markdown import NONE, Column, Table, number, significant, to_markdown
from tests.diagnostics.injected import score
from tests.diagnostics.injected.faults import KINDS
from tests.diagnostics.injected.runs import EVERY, STEPS, Run, trained

COMMAND = "make injected"
COUNTS = ("runs", "named", "right_layer", "right_role", "right")


Thresholds = tuple[float, float]  # of tensors and of updates


def judged(runs: list[Run]) -> tuple[Thresholds, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the thresholds, what each one tried gave, and of the other half a row per run and one per condition."""
    tensors, updates, tried = score.choose(runs)
    half = [run for run in runs if run.seed % 2]
    rows = {condition: score.named(half, condition, tensors, updates) for condition in score.CONDITIONS}
    tables = [
        score.table(found).assign(peers=condition.peers, every=condition.every) for condition, found in rows.items()
    ]
    rows, table = (pd.concat(parts, ignore_index=True) for parts in (rows.values(), tables))
    return (tensors, updates), tried, rows, table


def page(thresholds: Thresholds, tried: pd.DataFrame, table: pd.DataFrame) -> str:
    """Return the results as Markdown."""
    sections: list[str | Table] = []
    for (peers, every), rows in table.groupby(["peers", "every"], sort=False):
        like = f"{peers} healthy runs like it, a pass every {every} steps" if peers else "No healthy runs: limits alone"
        sections += [f"## {like}", _table(rows)]
    names = ("tensors, spreads", "updates, spreads", "healthy named", "precision", "recall")
    body = [
        [significant(row.threshold), NONE if np.isinf(row.update_threshold) else significant(row.update_threshold),
         f"{row.false}", number(row.precision, 3), number(row.recall, 3)]
        for row in tried.itertuples()
    ]  # fmt: skip
    note = (
        f"Even seeds, 4 peers, a pass every {EVERY} steps. Taken, by F1, of equals the last: {thresholds[0]:g} for "
        f"tensors, without updates, and beside it {thresholds[1]:g} for updates."
    )
    sections += ["## How the thresholds were chosen", Table(list(map(Column, names)), body, note)]
    return to_markdown([
        "# Injected faults", "**Is the first anomalous tensor the one with the injected fault?**", (
            f"Transformers of two blocks, {STEPS} steps, E4M3 under AdamW, `{COMMAND}`. The thresholds were chosen on "
            "the even seeds; the tables are of the odd ones. A tensor is right if its layer and role are those of the "
            "fault; of a learning rate, which has no layer, if the role is that of the updates. Harmed are runs whose "
            "loss left its band; lead is the median number of steps by which the tensor did so earlier."
        ),
        *(f"**{kind}**: {what}." for kind, what in KINDS.items()), *sections,
    ]) + "\n"  # fmt: skip


def _table(rows: pd.DataFrame) -> Table:
    heads = ("runs", "named", "layer right", "role right", "tensor right", "precision", "recall", "harmed",
             "recall, harmed", "lead, steps")  # fmt: skip
    body = []
    for row in rows.to_dict("records"):
        counts = [str(row[name]) for name in COUNTS]
        shares = [number(row["precision"], 2), number(row["recall"], 2)]
        body.append([row["kind"], *counts, *shares, str(row["harmed"]), number(row["recall_harmed"], 2),
                     number(row["lead"], 0)])  # fmt: skip
    return Table([Column("fault", numeric=False), *map(Column, heads)], body)


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.diagnostics.injected", description=__doc__.split("\n")[0])
    parser.add_argument("--healthy", type=int, default=56, help="runs without a fault (default %(default)s)")
    parser.add_argument("--each", type=int, default=20, help="runs with a fault of each kind (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("scratch/injected"), help="folder (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("reports/first_anomaly"), help="results (default %(default)s)")
    settings = parser.parse_args(arguments)
    torch.set_num_threads(1)
    thresholds, tried, rows, table = judged(list(trained(settings.runs, settings.healthy, settings.each)))
    write_text(settings.out / "README.md", page(thresholds, tried, table))
    for name, frame in (("runs", rows), ("table", table)):
        with replacing(settings.out / f"{name}.csv") as file:
            frame.to_csv(file, index=False, lineterminator="\n", float_format="%.6g")
    print(f"written: {settings.out}; thresholds {thresholds[0]:g} and, of updates, {thresholds[1]:g}")


if __name__ == "__main__":
    run_stage(main)
