"""The cells of a search: which are needed, and what became of those that ran."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from altgrad.config import cell_key
from altgrad.config.files import read_json
from altgrad.reporting.load import COMPLETED
from altgrad.stability.search import Ladder, next_rung

Pair = tuple[str, str]  # grid entry and arm


@dataclass
class Search:
    """The search for the edge of every grid entry and arm, under one set of settings.

    A rung is stable if the runs of all seeds are. A run is stable if it completes and ends at most ``within`` nats per
    token above the run of the same entry, arm and seed at the arm's own rate: what a format costs is no instability.
    Where that run did not complete, completing is enough.
    """

    entries: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    ladder: Ladder
    within: float
    known: dict[Pair, dict[int, bool]] = field(default_factory=dict)

    def needed(self) -> dict[str, tuple[Pair, int]]:
        """Return the cells to run next, each with what it is for; none once every edge is known."""
        found: dict[str, tuple[Pair, int]] = {}
        for pair in itertools.product(self.entries, self.arms):
            rung = next_rung(self.known.get(pair, {}), self.ladder)
            if rung is not None:
                found |= dict.fromkeys(self.cells(pair, rung), (pair, rung))
        return found

    def cells(self, pair: Pair, rung: int) -> list[str]:
        """Return the keys of a rung's cells."""
        return [cell_key(*pair, seed, self.ladder.scale(rung)) for seed in self.seeds]

    def judge(self, runs: Path) -> None:
        """Take in what the needed cells that are in ``runs`` came to."""
        for pair, rung in dict.fromkeys(self.needed().values()):
            of_rung = [metrics for key in self.cells(pair, rung) if (metrics := metrics_of(runs, key))]
            if len(of_rung) == len(self.seeds):
                stable = [self.is_stable(metrics, runs) for metrics in of_rung]
                self.known.setdefault(pair, {})[rung] = all(stable)

    def is_stable(self, metrics: Mapping[str, Any], runs: Path) -> bool:
        """Return whether a run is stable."""
        own = metrics_of(runs, cell_key(metrics["format"], metrics["optimizer"], metrics["seed"], 1))
        if metrics["outcome"] != COMPLETED:
            return False
        return own is None or own["outcome"] != COMPLETED or metrics["val_loss"] <= own["val_loss"] + self.within

    def rows(self, runs: Path) -> list[dict[str, Any]]:
        """Return a row for each run that was tried: what it was, what became of it, and whether that is stable."""
        return [
            {
                "format": pair[0], "optimizer": pair[1], "seed": metrics["seed"],
                "lr_scale": self.ladder.scale(rung), "rung": rung, "outcome": metrics["outcome"],
                "outcome_step": metrics["outcome_step"], "signature": metrics["signature"],
                "val_loss": metrics["val_loss"], "stable": self.is_stable(metrics, runs),
            }
            for pair, known in self.known.items()
            for rung in sorted(known)
            for key in self.cells(pair, rung)
            if (metrics := metrics_of(runs, key))
        ]  # fmt: skip


def metrics_of(runs: Path, key: str) -> dict[str, Any] | None:
    """Return what a cell came to, ``None`` while it has not run."""
    path = runs / key / "metrics.json"
    return read_json(path) if path.exists() else None
