"""How what an optimizer changes goes over the run: its validation loss minus its reference's, seed by seed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Column, Table
from altgrad.reporting.figures.select import at_best, of_completed
from altgrad.reporting.load import Study
from altgrad.reporting.paired import with_interval
from altgrad.reporting.roles import is_control
from altgrad.reporting.tables import words
from altgrad.reporting.wording import signed

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the run, at which the table says where it is


def courses(study: Study, comparison: Comparison) -> dict[tuple[str, str], pd.DataFrame]:
    """Return the difference of each optimizer to its reference in the same format, with the same seed, at each step.

    Each is at its best learning rate, and only completed runs count: what a diverged one lost would bend a mean.

    Returns:
        By format and optimizer, in the grid's order, a row per step at which both have a validation loss and a column
        per seed, in nats per token. The step before training, where nothing differs, is left out.
    """
    history = of_completed(at_best(study.history, comparison), study)
    history = history[history["step"] > 0]
    losses = {
        run: own.pivot(index="step", columns="seed", values="val_loss")
        for run, own in history.dropna(subset="val_loss").groupby(["format", "optimizer"], sort=False)
    }
    found = {
        (entry, arm): (losses[entry, arm] - losses[entry, plain]).dropna(how="all")
        for entry in study.formats
        for arm, plain in comparison.references.items()
        if (entry, arm) in losses and (entry, plain) in losses
    }
    return {run: own for run, own in found.items() if len(own)}


def course_table(study: Study, comparison: Comparison) -> Table | None:
    """Δ loss after a quarter, a half, three quarters and all of the steps, of all but controls; None without any."""
    found = {
        run: own for run, own in courses(study, comparison).items() if not is_control(study.arm(run[1]))
    }  # fmt: skip
    if not found:
        return None
    steps = sorted(set().union(*(own.index for own in found.values())))
    shown = dict.fromkeys(max(step for step in steps if step <= max(steps[0], share * steps[-1])) for share in SHARES)
    columns = [words(study.measure.entry), words("optimizer"), *(Column(f"after {step:g} steps") for step in shown)]
    rows = [
        [f"**{entry}**", arm, *map(_said, own.reindex(list(shown)).to_numpy())] for (entry, arm), own in found.items()
    ]
    note = (
        "Δ loss against the reference after the same step with the same seed, nats per token, each at its best "
        "learning rate, with the 95 % interval of each by itself. Before the last step the learning rate has not "
        "fallen as far, and nothing was asked beforehand."
    )
    return Table(columns, rows, note)


def _said(differences: np.ndarray) -> str:
    known = differences[np.isfinite(differences)]
    return signed(known[0], 4) if len(known) == 1 else with_interval(known)
