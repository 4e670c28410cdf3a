"""A figure of the report: how it is drawn, what is said of it, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.figures.findings import Findings
from altgrad.reporting.load import Study

Draw = Callable[[Study, Comparison], Figure | None]

#: Where a figure may stand, in the report's order; :mod:`altgrad.reporting.sections` says what stands around it.
SECTIONS = ("gains", "costs", "updates", "curves", "precision", "layers", "over time", "weights", "signals")


@dataclass(frozen=True)
class FigureSpec:
    """One figure. ``draw`` returns None where the study has no data for it, and it is left out.

    ``name`` is that of its files. ``section`` is one of `SECTIONS`, where figures stand by ``order``, then by name.
    ``{baseline}``, ``{optimizer}``, ``{formats}``, ``{entries}``, ``{grad}`` and ``{beyond}`` in ``alt`` and
    ``caption`` are filled in from the study; the last two are empty where there is nothing to say. One with
    ``findings`` stands in the report of studies alone that have any for it.
    """

    name: str
    draw: Draw
    section: str
    order: int
    alt: str
    caption: str
    findings: Findings | None = None

    def __post_init__(self) -> None:
        if self.section not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ValueError(f"figure {self.name}: no section {self.section!r} in the report; there are {known}")
