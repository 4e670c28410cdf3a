"""A figure of the report: how it is drawn, what is said of it, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from altgrad.reporting.compare import Comparison
from altgrad.reporting.load import Study

Draw = Callable[[Study, Comparison], Figure | None]

#: Where a figure may stand, in the report's order; :mod:`altgrad.reporting.report` says what stands around it.
SECTIONS = ("gains", "costs", "updates", "curves", "layers", "weights")
DECLARED: dict[str, FigureSpec] = {}


@dataclass(frozen=True)
class FigureSpec:
    """One figure: ``name`` is that of its files and of the function that draws it; `in_report` says the rest."""

    name: str
    draw: Draw
    section: str
    order: int
    alt: str
    caption: str


def in_report(section: str, order: int, alt: str, caption: str) -> Callable[[Draw], Draw]:
    """Declare the function below as a figure of the report; it returns None where the study has nothing to show.

    ``section`` is one of `SECTIONS`, where figures stand by ``order``. ``{baseline}``, ``{optimizer}``,
    ``{entries}`` and the words of its measure (``{noun}``, at the end of a run, ``{short}``, at any step, ``{unit}``,
    ``{entry}``, ``{better}``, ``{effect}``) are filled in from the study in ``alt`` and ``caption``, as are ``{grad}``,
    ``{beyond}`` and ``{spread}`` where there is something to say. Raises ValueError for another section, and for a name
    that is taken.
    """

    def declared(draw: Draw) -> Draw:
        name = draw.__name__
        if section not in SECTIONS:
            raise ValueError(f"figure {name}: no section {section!r} in the report; there are {', '.join(SECTIONS)}")
        if name in DECLARED:
            raise ValueError(f"two figures are called {name}")
        DECLARED[name] = FigureSpec(name, draw, section, order, alt, caption)
        return draw

    return declared
