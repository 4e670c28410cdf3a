"""Bisection over a ladder of learning rates: which rung to try next, and between which rungs stability ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from altgrad.common.files import read_json
from altgrad.config import cell_key
from altgrad.reporting.load import COMPLETED

Pair = tuple[str, str]  # grid entry and optimizer


@dataclass(frozen=True)
class Ladder:
    """Learning rates ``factor ** rung`` times the optimizer's own, for rungs from ``low`` to ``high``, 0 included."""

    low: int
    high: int
    factor: float = 2.0

    def scale(self, rung: int) -> int | float:
        """Return the multiple of the optimizer's rate at ``rung``; an int where it is whole."""
        scale = self.factor**rung
        return int(scale) if scale == int(scale) else scale

    @property
    def scales(self) -> list[int | float]:
        """The multiple at each rung."""
        return [self.scale(rung) for rung in range(self.low, self.high + 1)]


@dataclass(frozen=True)
class Edge:
    """Where stability ends: between two neighbouring rungs, or beyond an end of the ladder.

    ``stable`` is the highest rung found stable, ``unstable`` the lowest one above it found unstable; ``None`` where
    the ladder ended before.
    """

    stable: int | None
    unstable: int | None


def next_rung(known: Mapping[int, bool], ladder: Ladder) -> int | None:
    """Return the rung to try next, ``None`` once the edge is known; ``known`` says which rungs were stable.

    The optimizer's own rate comes first, then the end of the ladder on the side of the edge, then the middle between
    the highest stable rung and the lowest unstable one. That takes ``2 + log2(rungs)`` tries if stability ends once; a
    run that is stable again further up is not found.
    """
    if 0 not in known:
        return 0
    edge = edge_of(known)
    if edge.unstable is None:
        return ladder.high if edge.stable != ladder.high else None
    if edge.stable is None:
        return ladder.low if edge.unstable != ladder.low else None
    middle = (edge.stable + edge.unstable) // 2
    return middle if middle != edge.stable else None


def edge_of(known: Mapping[int, bool]) -> Edge:
    """Return the lowest unstable rung of ``known`` and the highest stable one below it."""
    unstable = min((rung for rung, stable in known.items() if not stable), default=None)
    below = [rung for rung, stable in known.items() if stable and (unstable is None or rung < unstable)]
    return Edge(max(below, default=None), unstable)


@dataclass
class Search:
    """The search for the edge of every grid entry and optimizer, under one set of settings.

    A rung is stable if the runs of all seeds are. A run is stable if it completes and ends at most ``within`` nats per
    token above the run of the same entry, optimizer and seed at the optimizer's own rate, so that the cost of a format
    is no instability. If that run did not complete, completing is enough.
    """

    entries: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    ladder: Ladder
    within: float
    known: dict[Pair, dict[int, bool]] = field(default_factory=dict)

    def needed(self) -> dict[str, tuple[Pair, int]]:
        """Return the cells to run next, each with the pair and rung it is for; none once every edge is known."""
        needed: dict[str, tuple[Pair, int]] = {}
        for pair in itertools.product(self.entries, self.arms):
            rung = next_rung(self.known.get(pair, {}), self.ladder)
            if rung is not None:
                needed |= dict.fromkeys(self.cells(pair, rung), (pair, rung))
        return needed

    def cells(self, pair: Pair, rung: int) -> list[str]:
        """Return the keys of a rung's cells, one per seed."""
        return [cell_key(*pair, seed, self.ladder.scale(rung)) for seed in self.seeds]

    def judge(self, runs: Path) -> None:
        """Judge the needed rungs of which all cells are in ``runs``."""
        for pair, rung in dict.fromkeys(self.needed().values()):
            of_rung = [metrics for key in self.cells(pair, rung) if (metrics := metrics_of(runs, key))]
            if len(of_rung) == len(self.seeds):
                stable = [self.is_stable(metrics, runs) for metrics in of_rung]
                self.known.setdefault(pair, {})[rung] = all(stable)

    def is_stable(self, metrics: Mapping[str, Any], runs: Path) -> bool:
        """Whether a run is stable, by its metrics.json."""
        own = metrics_of(runs, cell_key(metrics["format"], metrics["optimizer"], metrics["seed"], 1))
        if metrics["outcome"] != COMPLETED:
            return False
        return own is None or own["outcome"] != COMPLETED or metrics["val_loss"] <= own["val_loss"] + self.within

    def rows(self, runs: Path) -> list[dict[str, Any]]:
        """Return a row for each run that was tried: its identity, its outcome, and whether it is stable."""
        names = ("outcome", "outcome_step", "signature", "val_loss")
        return [
            {"format": pair[0], "optimizer": pair[1], "seed": metrics["seed"], "lr_scale": self.ladder.scale(rung),
             "rung": rung, **{name: metrics[name] for name in names}, "stable": self.is_stable(metrics, runs)}
            for pair, known in self.known.items()
            for rung in sorted(known)
            for key in self.cells(pair, rung)
            if (metrics := metrics_of(runs, key))
        ]  # fmt: skip


def metrics_of(runs: Path, key: str) -> dict[str, Any] | None:
    """Return the metrics.json of a cell, ``None`` while it has not run."""
    path = runs / key / "metrics.json"
    return read_json(path) if path.exists() else None
