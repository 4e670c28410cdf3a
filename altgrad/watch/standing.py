"""How the formats stand while cells still train, by the rules of the report."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from altgrad.config.tasks import Compared
from altgrad.watch.project import Seen

COMPLETED = "completed"


def standing(cells: Iterable[Seen], baseline: str, compared: Compared) -> list[dict[str, Any]]:
    """Return a row for each grid entry and arm of which a cell completed, in grid order.

    ``loss`` is the mean of what is ``compared``, such as the final validation loss, over the ``seeds`` that completed,
    of ``planned``, at the best of the learning rates (``lr_scale``); ``difference`` what the report calls the
    difference to the baseline: the mean over the seeds that both completed, each at its own best rate, with the ends
    ``low`` and ``high`` of its 95 % interval. ``None`` where there is nothing yet, or for the baseline itself.
    """
    from altgrad.reporting.runs import Run, Runs
    from altgrad.reporting.statistics import interval  # which loads pandas, and nobody needs before a cell is there

    of = [(cell, cell.settings) for cell in cells]
    seeds = list(dict.fromkeys(own["seed"] for _, own in of))
    rates = sorted({own["lr_scale"] for _, own in of})
    identities = [tuple(own[name] for name in ("format", "optimizer", "lr_scale", "seed")) for _, own in of]
    runs, by = (
        Runs.of_losses(((*i, _final(cell, column)) for i, (cell, _) in zip(identities, of, strict=True)), seeds)
        for column in (compared.final, compared.on_validation)  # the latter chooses a rate, as in the report
    )

    def chosen(entry: str, arm: str) -> Run:
        return by.best(((entry, arm, rate) for rate in rates), higher_is_better=compared.higher_is_better)

    rows = []
    for entry, arm in dict.fromkeys((own["format"], own["optimizer"]) for _, own in of):
        best = chosen(entry, arm)
        completed = runs.completed(best)
        if not completed:
            continue
        row = {
            "format": entry, "arm": arm, "lr_scale": best[2], "seeds": completed, "planned": len(seeds),
            "loss": float(runs.of_run(best).mean()), "difference": None, "low": None, "high": None,
        }  # fmt: skip
        if entry != baseline and (baseline, arm, best[2]) in runs.place:
            base = chosen(baseline, arm)
            difference = runs.difference({best: 1, base: -1})
            if difference is not None:
                _, low, high = interval((runs.of_run(best) - runs.of_run(base)).to_numpy())
                row |= {"difference": difference.mean, "low": _or_none(low), "high": _or_none(high)}
        rows.append(row)
    return rows


def _final(cell: Seen, column: str) -> float:
    value = cell.metrics[column] if cell.outcome == COMPLETED else None
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
