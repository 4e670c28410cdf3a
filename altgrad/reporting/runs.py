"""The final losses of a study as one table, and contrasts of them: sums of runs with signs, paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from altgrad.reporting.load import COMPLETED, Study
from altgrad.reporting.statistics import Difference, summarised

RUN = ["format", "optimizer", "lr_scale"]

Run = tuple[str, str, float]
Contrast = Mapping[Run, int]  # with which sign a run's loss enters


@dataclass(frozen=True)
class Runs:
    """What is compared, such as the final validation loss, by run and seed.

    ``place`` is a run's row in ``losses``, float64 (runs, seeds), NaN where a cell did not complete. Runs that are
    equal to the last bit, as E0M7's and E1M6's are, share a row.
    """

    place: dict[Run, int]
    losses: np.ndarray

    @classmethod
    def of(cls, study: Study, column: str = "") -> Runs:
        """Return those of every cell in ``study`` that completed: what it compares, or another ``column`` of cells."""
        cells = study.cells
        losses = cells[column or study.measure.column].where(cells["status"] == COMPLETED).to_numpy(dtype="float64")
        identity = (cells["format"], cells["optimizer"], cells["lr_scale"], cells["seed"])
        return cls.of_losses(zip(*identity, losses, strict=True), study.seeds)

    @classmethod
    def of_losses(cls, losses: Iterable[tuple[str, str, float, int, float]], seeds: Sequence[int]) -> Runs:
        """Return those of cells given as (entry, arm, rate, seed, loss), NaN for one that did not complete."""
        positions = {seed: i for i, seed in enumerate(seeds)}
        rows: dict[Run, np.ndarray] = {}
        for entry, arm, rate, seed, loss in losses:
            rows.setdefault((entry, arm, rate), np.full(len(positions), np.nan))[positions[seed]] = loss
        distinct: dict[bytes, int] = {}
        place = {run: distinct.setdefault(row.tobytes(), len(distinct)) for run, row in rows.items()}
        table = np.array([np.frombuffer(row) for row in distinct]).reshape(len(distinct), len(positions))
        return cls(place, table)

    def of_run(self, run: Run) -> pd.Series:
        """Return the losses of a run by seed's position."""
        return pd.Series(self.losses[self.place[run]])

    def row(self, contrast: Contrast) -> np.ndarray:
        """Return the weight of each row of ``losses`` in ``contrast``."""
        weights = np.zeros(len(self.losses))
        for run, sign in contrast.items():
            weights[self.place[run]] += sign
        return weights

    def by_seed(self, contrast: Contrast) -> np.ndarray:
        """Return ``contrast`` seed by seed, NaN where one of its runs has no loss or there is no such run."""
        if any(run not in self.place for run in contrast):
            return np.full(self.losses.shape[1], np.nan)
        return sum((sign * self.losses[self.place[run]] for run, sign in contrast.items()), np.zeros(1))

    def difference(self, contrast: Contrast) -> Difference | None:
        """Return the mean of ``contrast`` over the seeds that all of its runs completed; ``None`` without any."""
        differences = self.by_seed(contrast)
        if not np.isfinite(differences).any():
            return None
        size = sum(abs(sign) * np.nanmax(np.abs(self.losses[self.place[run]])) for run, sign in contrast.items())
        return summarised(differences, float(size))

    def completed(self, run: Run) -> int:
        """Return how many seeds of ``run`` completed."""
        return int(np.isfinite(self.losses[self.place[run]]).sum())

    def best(self, candidates: Iterable[Run], *, higher_is_better: bool = False) -> Run:
        """Return the run with most completed seeds, then the best mean over the seeds that those share.

        Where they share none, the first: the smallest learning rate of an ascending list is the most stable one.
        """
        candidates = list(candidates)
        most = max(self.completed(run) for run in candidates)
        left = [run for run in candidates if self.completed(run) == most]
        table = np.array([self.losses[self.place[run]] for run in left])
        shared = np.isfinite(table).all(axis=0)
        if not shared.any():
            return left[0]
        means = table[:, shared].mean(axis=1)
        return left[int(means.argmax() if higher_is_better else means.argmin())]
