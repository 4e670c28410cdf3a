"""How the formats stand while cells still train, by the rules of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from altgrad.watch.project import Seen

COMPLETED = "completed"


def standing(cells: Iterable[Seen], baseline: str) -> list[dict[str, Any]]:
    """Return a row for each grid entry and arm of which a cell completed, in grid order.

    ``loss`` is the mean final validation loss over the ``seeds`` that completed, of ``planned``, at the best of the
    learning rates (``lr_scale``); ``difference`` what the report calls the difference to the baseline: the mean over
    the seeds that both completed, each at its own best rate, with the ends ``low`` and ``high`` of its 95 % interval.
    ``None`` where there is nothing yet, or for the baseline itself.
    """
    from altgrad.reporting.runs import Runs
    from altgrad.reporting.statistics import interval  # which loads pandas, and nobody needs before a cell is there

    of = [(cell, cell.settings) for cell in cells]
    seeds = list(dict.fromkeys(own["seed"] for _, own in of))
    rates = sorted({own["lr_scale"] for _, own in of})
    runs = Runs.of_losses(
        ((own["format"], own["optimizer"], own["lr_scale"], own["seed"], _loss(cell)) for cell, own in of), seeds
    )
    rows = []
    for entry, arm in dict.fromkeys((own["format"], own["optimizer"]) for _, own in of):
        best = runs.best((entry, arm, rate) for rate in rates)
        completed = runs.completed(best)
        if not completed:
            continue
        row = {
            "format": entry, "arm": arm, "lr_scale": best[2], "seeds": completed, "planned": len(seeds),
            "loss": float(runs.of_run(best).mean()), "difference": None, "low": None, "high": None,
        }  # fmt: skip
        if entry != baseline and (baseline, arm, best[2]) in runs.place:
            base = runs.best((baseline, arm, rate) for rate in rates)
            difference = runs.difference({best: 1, base: -1})
            if difference is not None:
                _, low, high = interval((runs.of_run(best) - runs.of_run(base)).to_numpy())
                row |= {"difference": difference.mean, "low": _or_none(low), "high": _or_none(high)}
        rows.append(row)
    return rows


def _loss(cell: Seen) -> float:
    return cell.metrics["val_loss"] if cell.outcome == COMPLETED else math.nan


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
