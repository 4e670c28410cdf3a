"""The control that costs nothing: E0M7 and E1M6, one quantization grid at two scales, train alike to the bit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from altgrad.reporting.load import MISSING, Study

TWINS = ("E0M7", "E1M6")
COMPARED = ["train_loss", "val_loss", "grad_norm"]


@dataclass(frozen=True)
class Control:
    """Agreement of the twin formats.

    ``pairs`` is the number of cell pairs that both ran, ``values`` the number of logged losses and
    gradient norms compared, and ``max_difference`` their largest absolute difference: infinite when
    the two did not log the same steps or ended in different outcomes.
    """

    pairs: int
    values: int
    max_difference: float

    @property
    def agrees(self) -> bool:
        """Whether every value is equal to the last bit."""
        return self.max_difference == 0


def check_twins(study: Study) -> Control | None:
    """Compare every (optimizer, seed, lr_scale) that ran in both twins; ``None`` if there is none."""
    ran = study.cells[study.cells["status"] != MISSING]
    keys = ["optimizer", "seed", "lr_scale"]
    first, second = (ran[ran["format"] == twin].set_index(keys) for twin in TWINS)
    shared = first.index.intersection(second.index)
    if shared.empty:
        return None
    histories = [study.history[study.history["format"] == twin].set_index([*keys, "step"])[COMPARED] for twin in TWINS]
    histories = [frame[frame.index.droplevel("step").isin(shared)] for frame in histories]
    same_outcome = (first.loc[shared, ["status", "signature", "outcome_step"]]).equals(
        second.loc[shared, ["status", "signature", "outcome_step"]]
    )
    values = int(histories[0].notna().sum().sum())
    if not same_outcome or not histories[0].index.equals(histories[1].index):
        return Control(len(shared), values, math.inf)
    return Control(len(shared), values, _largest(histories[0], histories[1]))


def _largest(a: pd.DataFrame, b: pd.DataFrame) -> float:
    """Return the largest absolute difference; infinite where only one of the two has a value."""
    if not a.isna().equals(b.isna()):
        return math.inf
    return float((a - b).abs().max().max(skipna=True)) if a.notna().any(axis=None) else 0.0
