"""Is the first anomalous tensor the one with the injected fault? Counted by kind of fault.

The runs are split by their seed: with the even ones the thresholds are chosen, on the odd ones they are judged. Peers
are drawn from the healthy runs of the same half. What is named is right if layer and role are those of the fault; of a
learning rate, if the role is. Recall is the share of injected faults that are named right, precision the share of named
runs, a healthy one that is named included in `all`, that are named right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import pandas as pd

from altgrad.metrics.first_anomaly import Peers, Trace, first_anomaly
from reports.first_anomaly.injected.faults import HEALTHY, KINDS, OF_UPDATES
from reports.first_anomaly.injected.runs import EVERY, Run

THRESHOLDS = (4, 6, 8, 10, 12, 16, 24, 32)  # tried for tensors, with updates left out, then for updates
ALL = "all"


@dataclass(frozen=True)
class Condition:
    """How much is known of a run: the number of healthy ones like it, the steps between its instrumented passes."""

    peers: int
    every: int


CHOSEN_UNDER = Condition(peers=4, every=EVERY)  # what a default grid of five seeds has
CONDITIONS = (CHOSEN_UNDER, Condition(16, EVERY), Condition(4, 4 * EVERY), Condition(0, EVERY))


@cache
def trace_of(run: Run, every: int = EVERY) -> Trace:
    """Return what ``run`` recorded, as if its instrumented passes had been ``every`` steps apart."""
    metrics = json.loads((run.folder / "metrics.json").read_text(encoding="utf-8"))
    diverged = metrics["outcome_step"] if metrics["outcome"] == "diverged" else None
    monitors, history = pd.read_parquet(run.folder / "monitors.parquet"), pd.read_csv(run.folder / "history.csv")
    monitors = monitors[(monitors["step"] == 1) | (monitors["step"] % every == 0)]
    return Trace(monitors, history, diverged, metrics["first_nonfinite"] or "")


def named(runs: Sequence[Run], condition: Condition, threshold: float, update_threshold: float) -> pd.DataFrame:
    """Return a row per run: its fault, the first anomaly that is named, and whether that is right."""
    traces = {run.seed: trace_of(run, condition.every) for run in runs}
    healthy = [run.seed for run in runs if run.fault.kind == HEALTHY]
    rows = []
    for run in runs:
        others = [seed for seed in healthy if seed != run.seed and seed % 2 == run.seed % 2]
        drawn = np.random.default_rng(run.seed).permutation(others)[: condition.peers]
        found = first_anomaly(traces[run.seed], Peers(traces[seed] for seed in drawn), threshold, update_threshold)
        first = found.excursion
        named = {"layer": first.layer, "role": first.role, "metric": first.metric, "step": first.step} if first else {}
        right_role = first is not None and first.role == run.fault.role
        right_layer = first is not None and (run.fault.kind in OF_UPDATES or first.layer == run.fault.layer)
        rows.append({
            "seed": run.seed, "half": ("chosen", "judged")[run.seed % 2], **asdict(condition), "threshold": threshold,
            "update_threshold": update_threshold, **asdict(run.fault), "named": first is not None,
            **{f"named_{name}": named.get(name) for name in ("layer", "role", "metric", "step")},
            "right_layer": right_layer, "right_role": right_role, "right": right_layer and right_role,
            "loss_step": found.loss_step, "lead": found.lead,
        })  # fmt: skip
    return pd.DataFrame(rows)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per kind of fault, healthy runs, and all of them.

    ``harmed`` are the runs whose loss left its band or that diverged, ``recall_harmed`` is over those; ``lead`` is the
    median of the steps from the excursion to the loss's, of what is named right.
    """
    kinds = [kind for kind in (*KINDS, HEALTHY, ALL) if kind == ALL or kind in set(rows["kind"])]
    return pd.DataFrame([_row(rows if kind == ALL else rows[rows["kind"] == kind], kind) for kind in kinds])


def choose(runs: Sequence[Run]) -> tuple[float, float, pd.DataFrame]:
    """Return the thresholds of tensors and of updates, and a row per pair that was tried.

    Each has the highest F1 of layer and role, of equals the highest threshold; that of tensors is chosen without
    updates, and then that of updates beside it.
    """
    half = [run for run in runs if run.seed % 2 == 0]
    tensors = pd.DataFrame([_tried(half, threshold, math.inf) for threshold in THRESHOLDS])
    threshold = _best(tensors, "threshold")
    updates = pd.DataFrame([_tried(half, threshold, update_threshold) for update_threshold in THRESHOLDS])
    return threshold, _best(updates, "update_threshold"), pd.concat([tensors, updates], ignore_index=True)


def _tried(half: Sequence[Run], threshold: float, update_threshold: float) -> dict[str, object]:
    found = table(named(half, CHOSEN_UNDER, threshold, update_threshold)).set_index("kind")
    row = {"threshold": threshold, "update_threshold": update_threshold, "false": found.loc[HEALTHY, "named"]}
    row |= found.loc[ALL].to_dict()
    return row | {"f1": 2 * row["precision"] * row["recall"] / (row["precision"] + row["recall"])}


def _best(tried: pd.DataFrame, name: str) -> float:
    return float(tried.loc[tried["f1"] >= tried["f1"].max() - 1e-12, name].max())


def _row(rows: pd.DataFrame, kind: str) -> dict[str, object]:
    faulty, found = rows[rows["kind"] != HEALTHY], rows[rows["named"]]
    harmed = faulty[faulty["loss_step"].notna()]
    return {
        "kind": kind, "runs": len(rows), "named": len(found),
        **{column: int(faulty[column].sum()) for column in ("right_layer", "right_role", "right")},
        "precision": faulty["right"].sum() / len(found) if len(found) and len(faulty) else np.nan,
        "recall": faulty["right"].mean() if len(faulty) else np.nan,
        "harmed": len(harmed), "recall_harmed": harmed["right"].mean() if len(harmed) else np.nan,
        "lead": faulty.loc[faulty["right"], "lead"].median(),
    }  # fmt: skip
