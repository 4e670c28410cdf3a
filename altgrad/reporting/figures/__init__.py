"""The report's figures: `in_report` declares a function of any module here as a figure, and `draw` draws them all.

A figure that has nothing to show is left out of the report.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure

from altgrad.common.machine import usable_cores
from altgrad.reporting.compare import Comparison, shown_optimizer
from altgrad.reporting.figures.style import drawing, save
from altgrad.reporting.load import Study, every_rule
from altgrad.reporting.markdown import ITS_RUNS, Picture, listed, to_runs

Draw = Callable[[Study, Comparison], Figure | None]

#: Where a figure may stand, in the report's order; `altgrad.reporting.report` has the titles and the tables there.
SECTIONS = ("gains", "costs", "updates", "curves", "layers", "weights")
_declared: dict[str, FigureSpec] = {}
_drawn: Callable[[FigureSpec], bool]  # the function that forked processes call; it cannot be pickled


@dataclass(frozen=True)
class FigureSpec:
    """A figure. ``name`` names its files and the function ``draw``; `in_report` explains the other fields."""

    name: str
    draw: Draw
    section: str
    order: int
    alt: str
    caption: str


def in_report(section: str, order: int, alt: str, caption: str) -> Callable[[Draw], Draw]:
    """Return a decorator that declares a function as a figure; the function returns None if there is nothing to show.

    Args:
        section: one of `SECTIONS`.
        order: the figure's place in the section: figures stand in ascending order.
        alt, caption: texts, with these words of the study filled in: ``{baseline}``, ``{optimizer}`` (the one that
            per-layer figures show), ``{entries}``, and of the primary metric ``{noun}`` (at the end of a run),
            ``{short}`` (at any step), ``{unit}``, ``{entry}``, ``{better}`` and ``{effect}``. ``{grad}``, ``{beyond}``
            and ``{spread}`` are empty where there is nothing to say.

    The decorator raises ValueError for an unknown section, and for a function whose name is taken.
    """

    def declared(draw: Draw) -> Draw:
        name = draw.__name__
        if section not in SECTIONS:
            raise ValueError(f"figure {name}: no section {section!r} in the report; there are {', '.join(SECTIONS)}")
        if name in _declared:
            raise ValueError(f"two figures are called {name}")
        _declared[name] = FigureSpec(name, draw, section, order, alt, caption)
        return draw

    return declared


@cache
def report_figures() -> list[FigureSpec]:
    """Return the figures that the modules of this folder declare, in the report's order."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_declared.values(), key=lambda spec: (SECTIONS.index(spec.section), spec.order, spec.name))


def draw(specs: Sequence[FigureSpec], study: Study, comparison: Comparison, folder: Path) -> dict[str, Picture]:
    """Draw each of ``specs`` that has data as PNG and SVG in ``folder``; return the pictures by name, in order.

    Other PNG and SVG files in the folder are removed, so that it holds what the report shows.
    """

    def drawn(spec: FigureSpec) -> bool:
        with drawing():
            figure = spec.draw(study, comparison)
            if figure is not None:
                save(figure, folder, spec.name)
        return figure is not None

    words = _words(study, comparison)
    pictures = {}
    for spec, exists in zip(specs, _on_all_cores(drawn, specs), strict=True):
        if exists:
            runs = {"optimizer": words["optimizer"]} if "{optimizer}" in spec.caption else {}
            alt, caption = (text[:1].upper() + text[1:].strip() for text in (
                spec.alt.format(**words), spec.caption.format(**words)
            ))  # fmt: skip
            pictures[spec.name] = Picture(spec.name, alt, f"{caption} {to_runs(ITS_RUNS, **runs)}")
    for path in [*folder.glob("*.png"), *folder.glob("*.svg")]:
        if path.stem not in pictures:
            path.unlink()
    return pictures


def _on_all_cores(function: Callable[[FigureSpec], bool], specs: Sequence[FigureSpec]) -> list[bool]:
    """Return ``function(spec)`` for each spec, with a process per core: drawing takes most of a report's time.

    Processes are forked, so that nothing is loaded or copied again. Where forking is not safe, this process does all.
    """
    global _drawn
    _drawn, jobs = function, min(usable_cores(), len(specs))
    if sys.platform != "linux" or jobs < 2:
        return [function(spec) for spec in specs]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        exist = pool.map(_call, specs, chunksize=1)
        pool.close()  # the processes then end by themselves; the pool's signal would reach the caller's handler
        pool.join()
    return exist


def _call(spec: FigureSpec) -> bool:
    return _drawn(spec)


def _words(study: Study, comparison: Comparison) -> dict[str, str]:
    """Return the text for each word in braces that `in_report` fills in."""
    rules = [rule for cell in study.resolved.values() for rule in every_rule(cell)]
    grads = {rule["grad"]["format"] for rule in rules if rule["grad"]}
    metric, gains = study.primary, comparison.gains.dropna(subset="claim")
    specific, spread = gains["beyond"].notna().any(), any(claim.half_width > 0 for claim in gains["claim"])
    return {
        "baseline": study.baseline or "the baseline",
        "optimizer": shown_optimizer(study, comparison),
        "entries": listed(study.formats),
        "grad": f"Incoming gradients are in {next(iter(grads))} in every column." if len(grads) == 1 else "",
        "beyond": f"Small hollow marks: the {metric.entry}-specific effect." if specific else "",
        "spread": ", with its 95 % interval" if spread else "",
        # Curves are of validation documents, and a classifier is compared on those of the test split.
        "short": metric.noun if metric.final == metric.on_validation else f"validation {metric.noun}",
        "noun": metric.full, "entry": metric.entry, "unit": metric.with_unit(""),
        "better": "right" if metric.higher_is_better else "left", "effect": f"{metric.smallest_effect:g}",
    }  # fmt: skip
