"""Finds the largest stable learning rate of each format and optimizer by bisection over training runs.

This file has the bisection over a ladder of learning rates: which rate to try next, and where stability ends.
"""

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
    """Multiples ``factor ** rung`` of the optimizer's own rate, for rungs from ``low`` (<= 0) to ``high`` (>= 0)."""

    low: int
    high: int
    factor: float = 2.0

    def scale(self, rung: int) -> int | float:
        """Return the multiple of the optimizer's rate at ``rung``, such as 4 or 0.25; whole numbers are ints."""
        scale = self.factor**rung
        return int(scale) if scale == int(scale) else scale

    @property
    def scales(self) -> list[int | float]:
        """The multiples of all rungs, from ``low`` to ``high``."""
        return [self.scale(rung) for rung in range(self.low, self.high + 1)]


@dataclass(frozen=True)
class Edge:
    """The two rungs between which stability ends, neighbours once a search is over.

    ``unstable`` is the lowest rung found unstable, ``stable`` the highest stable rung below it. Either may be ``None``.
    """

    stable: int | None
    unstable: int | None


def next_rung(known: Mapping[int, bool], ladder: Ladder) -> int | None:
    """Return the rung to try next, ``None`` once the edge is known; ``known`` maps each tried rung to its stability.

    Rung 0 comes first: the optimizer's own rate. Then comes the top of the ladder if rung 0 is stable, else the bottom.
    Then comes the middle between the highest stable and the lowest unstable rung. The search takes about
    ``2 + log2(rungs)`` tries. It assumes that stability ends once, and misses rates that are stable again further up.
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
    """Return the edge among the tried rungs; ``known`` maps each rung to whether it is stable."""
    unstable = min((rung for rung, stable in known.items() if not stable), default=None)
    below = [rung for rung, stable in known.items() if stable and (unstable is None or rung < unstable)]
    return Edge(max(below, default=None), unstable)


@dataclass
class Search:
    """The search for the edge of each format (grid entry) and optimizer, under one set of settings.

    A rung is stable if the runs of all ``seeds`` are stable. A run is stable if it completes with a validation loss at
    most ``within`` nats per token above its reference. The reference is the run of the same entry, optimizer and seed
    at the optimizer's own rate, so a format's cost does not count as instability. If the reference did not complete,
    completing is enough. ``known`` has the stability of each rung tried, by entry and optimizer.
    """

    entries: Sequence[str]
    arms: Sequence[str]
    seeds: Sequence[int]
    ladder: Ladder
    within: float
    known: dict[Pair, dict[int, bool]] = field(default_factory=dict)

    def needed(self) -> dict[str, tuple[Pair, int]]:
        """Return ``{cell key: (pair, rung)}`` of the runs to do next; ``{}`` once every edge is known."""
        needed: dict[str, tuple[Pair, int]] = {}
        for pair in itertools.product(self.entries, self.arms):
            rung = next_rung(self.known.get(pair, {}), self.ladder)
            if rung is not None:
                needed |= dict.fromkeys(self.cells(pair, rung), (pair, rung))
        return needed

    def cells(self, pair: Pair, rung: int) -> list[str]:
        """Return the cell keys of the runs at ``rung``, one per seed."""
        return [cell_key(*pair, seed, self.ladder.scale(rung)) for seed in self.seeds]

    def judge(self, runs: Path) -> None:
        """Record in ``known`` whether each needed rung is stable, once the runs of all its seeds are in ``runs``."""
        for pair, rung in dict.fromkeys(self.needed().values()):
            of_rung = [metrics for key in self.cells(pair, rung) if (metrics := metrics_of(runs, key))]
            if len(of_rung) == len(self.seeds):
                stable = [self.is_stable(metrics, runs) for metrics in of_rung]
                self.known.setdefault(pair, {})[rung] = all(stable)

    def is_stable(self, metrics: Mapping[str, Any], runs: Path) -> bool:
        """Whether the run with these ``metrics`` (metrics.json) is stable; its reference run is read from ``runs``."""
        own = metrics_of(runs, cell_key(metrics["format"], metrics["optimizer"], metrics["seed"], 1))
        if metrics["outcome"] != COMPLETED:
            return False
        return own is None or own["outcome"] != COMPLETED or metrics["val_loss"] <= own["val_loss"] + self.within

    def rows(self, runs: Path) -> list[dict[str, Any]]:
        """Return a row per run of the tried rungs: format, optimizer, seed, rate, outcome, loss and ``stable``."""
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
    """Return the content of a cell's metrics.json, ``None`` if the cell has not run yet."""
    path = runs / key / "metrics.json"
    return read_json(path) if path.exists() else None
