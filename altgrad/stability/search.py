"""Bisection over a ladder of learning rates: which rung to try next, and where stability ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ladder:
    """Learning rates ``factor ** rung`` times the arm's own, for the rungs from ``low`` to ``high``, 0 among them."""

    low: int
    high: int
    factor: float = 2.0

    def scale(self, rung: int) -> int | float:
        """Return the multiple of the arm's rate at ``rung``, whole where it is."""
        found = self.factor**rung
        return int(found) if found == int(found) else found

    @property
    def scales(self) -> list[int | float]:
        """The multiples of all rungs, ascending."""
        return [self.scale(rung) for rung in range(self.low, self.high + 1)]


@dataclass(frozen=True)
class Edge:
    """Where stability ends: between two neighbouring rungs, or beyond an end of the ladder.

    ``stable`` is the highest rung that was found stable, ``unstable`` the lowest above it that was found not to be;
    ``None`` where the ladder ended before.
    """

    stable: int | None
    unstable: int | None


def next_rung(known: Mapping[int, bool], ladder: Ladder) -> int | None:
    """Return the rung to try next, ``None`` once the edge is known; ``known`` says which rungs were stable.

    First the arm's own rate, then the end of the ladder on the side where the edge must be, then the middle between the
    highest stable rung and the lowest unstable one. That takes ``2 + log2(rungs)`` tries where stability ends once; of
    a run that is stable again further up nothing is seen.
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
    """Return the edge as far as ``known`` has it: the lowest unstable rung, and the highest stable one below it."""
    unstable = min((rung for rung, stable in known.items() if not stable), default=None)
    below = [rung for rung, stable in known.items() if stable and (unstable is None or rung < unstable)]
    return Edge(max(below, default=None), unstable)
