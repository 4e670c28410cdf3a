"""What an arm gains over the run: the plain arm's validation loss minus its own, seed by seed and step by step."""

from __future__ import annotations

import numpy as np
import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Table
from altgrad.reporting.figures.select import at_best, of_completed
from altgrad.reporting.load import Study
from altgrad.reporting.paired import with_interval
from altgrad.reporting.tables import words
from altgrad.reporting.wording import signed

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)  # of the run, at which the table says what is gained


def gain_courses(study: Study, comparison: Comparison) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the gain of each arm over its plain arm in the same format, with the same seed, after the same step.

    Each arm is at its best learning rate, and only completed runs count: what a diverged one lost would bend a mean.

    Returns:
        By format and arm, in the grid's order, a row per step at which both have a validation loss and a column per
        seed, in nats per token. The step before training, where nothing is gained, is left out.
    """
    history = of_completed(at_best(study.history, comparison), study)
    history = history[history["step"] > 0]
    losses = {
        run: own.pivot(index="step", columns="seed", values="val_loss")
        for run, own in history.dropna(subset="val_loss").groupby(["format", "optimizer"], sort=False)
    }
    gains = {
        (entry, arm): (losses[entry, plain] - losses[entry, arm]).dropna(how="all")
        for entry in study.formats
        for arm, plain in comparison.references.items()
        if (entry, arm) in losses and (entry, plain) in losses
    }
    return {run: own for run, own in gains.items() if len(own)}


def gain_course_table(courses: dict[tuple[str, str], pd.DataFrame]) -> Table | None:
    """Gain after an eighth, a quarter, a half, three quarters and all of the steps; None without any gain."""
    if not courses:
        return None
    steps = sorted(set().union(*(own.index for own in courses.values())))
    shown = dict.fromkeys(max(step for step in steps if step <= max(steps[0], share * steps[-1])) for share in SHARES)
    columns = [words("format"), words("arm"), *(Column(f"after {step:g} steps") for step in shown)]
    rows = [
        [f"**{entry}**", arm, *map(_said, own.reindex(list(shown)).to_numpy())] for (entry, arm), own in courses.items()
    ]
    note = (
        "Validation loss of the plain arm minus the arm's after the same step with the same seed, nats per token, each "
        "at its best learning rate, with the 95 % interval of each by itself. But for the last step nothing of it was "
        "asked beforehand, and before it the learning rate has not fallen as far."
    )
    return Table(columns, rows, note)


def _said(gains: np.ndarray) -> str:
    known = gains[np.isfinite(gains)]
    return signed(known[0], 4) if len(known) == 1 else with_interval(known)
