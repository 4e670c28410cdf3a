"""What `budget.early_stop` saves, and whether it would have stopped a cell that ended best, by those that finished."""

from __future__ import annotations

import pandas as pd

from altgrad.config.early_stop import LAST, MARGIN, early_loss, is_beaten
from altgrad.reporting.document import Block, Text
from altgrad.reporting.load import COMPLETED, IDENTITY, MISSING, Study
from altgrad.reporting.runs import PRIMARY
from altgrad.reporting.wording import number, percent_of, plural

ALIKE = ["format", "optimizer", "seed"]  # cells that differ in their learning rate alone


def early_stopping(study: Study) -> list[Block]:
    """Return a paragraph; nothing where every arm has one learning rate."""
    if len(study.lr_scales) < 2:
        return []
    judged = judgements(study)
    if judged.empty:
        return []
    stopped, best = judged[judged["beaten"]], judged[judged["best"]]
    share = (1 - LAST) * stopped["planned_steps"].sum() / judged["planned_steps"].sum()
    text = (
        f"`budget.early_stop` gives up a cell whose training loss over the second tenth of its steps lies more than "
        f"{MARGIN:g} nats above that of another learning rate with the same format, arm and seed. Of the "
        f"{plural(len(judged), 'cell')} here that went that far beside a rival to their end, that is "
        f"{len(stopped)}, {number(100 * share, 0)} % of their steps; of those that end best of their rivals, "
        f"{percent_of(int((judged['beaten'] & judged['best']).sum()), len(best))} would have been stopped."
    )
    return [Text(text)]


def judgements(study: Study) -> pd.DataFrame:
    """Return the cells that ended beside a rival: whether the rule stops them, and whether they ended best.

    A cell that diverged ended after all others. Columns: those of the cells, ``beaten``, ``best``.
    """
    histories = dict(iter(study.history.groupby(IDENTITY, sort=False)))
    cells = study.cells[study.cells["status"] != MISSING].copy()
    losses = {}
    for cell in cells.itertuples():
        rows = histories.get(tuple(getattr(cell, name) for name in IDENTITY))
        if rows is not None:
            logged = rows["train_loss"].astype(object).where(rows["train_loss"].notna(), None)
            losses[cell.Index] = early_loss(zip(rows["step"], logged, strict=True), int(cell.planned_steps))
    cells["early"] = pd.Series(losses, dtype="float64")
    cells = cells[cells["early"].notna()]
    cells = cells[cells.groupby(ALIKE)["early"].transform("size") > 1]
    final = cells[PRIMARY].where(cells["status"] == COMPLETED, float("inf"))
    lowest = final.groupby([cells[name] for name in ALIKE]).transform("min")
    beaten = []
    for _, group in cells.groupby(ALIKE, sort=False):
        for key, own in group["early"].items():
            beaten.append((key, is_beaten(own, group["early"].drop(key))))
    return cells.assign(beaten=pd.Series(dict(beaten), dtype="bool"), best=(final == lowest) & (final < float("inf")))
