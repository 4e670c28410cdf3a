"""The rule of ``budget.early_stop``: when a cell is given up, for whoever stops it and whoever checks that.

Cells that differ in their learning rate alone have the same initial weights and the same batches, so that their
training losses can be held against each other early. A cell is given up when another rate's loss, over the second tenth
of the steps, lies below its own by more than `MARGIN`. The cells of the grid's first seed are never given up: on them
it is seen whether one that would have been ends best.
"""

from __future__ import annotations

from collections.abc import Iterable

FIRST, LAST = 0.1, 0.2  # shares of the steps whose losses count
MARGIN = 0.2  # nats per token; the report counts what it would have cost


def early_loss(rows: Iterable[tuple[float, float | None]], steps: int) -> float | None:
    """Return the mean training loss over the second tenth of ``steps``, ``None`` before it is over.

    ``rows``: step and training loss, ``None`` where it was not logged or is not finite. A run that has no finite loss
    there has lost: infinity.
    """
    seen, losses, last = False, [], 0.0
    for step, loss in rows:
        last = max(last, step)
        if FIRST * steps < step <= LAST * steps:
            seen = True
            losses += [loss] if loss is not None else []
    if last < LAST * steps:
        return None
    return sum(losses) / len(losses) if losses else float("inf") if seen else None


def is_beaten(own: float | None, rivals: Iterable[float | None]) -> bool:
    """Whether one of the rivals' early losses lies below ``own`` by more than `MARGIN`."""
    best = min((loss for loss in rivals if loss is not None), default=None)
    return own is not None and best is not None and own - best > MARGIN
