"""The report's figures: found in the modules of this folder, drawn, and put where they say that they stand.

A figure with nothing to show is left out, and so is its place in the report. Records of `make bench` have one each.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from altgrad.common.threads import usable_cores
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Picture
from altgrad.reporting.figures.spec import DECLARED, SECTIONS, FigureSpec
from altgrad.reporting.figures.style import drawing, save
from altgrad.reporting.load import Study, every_rule
from altgrad.reporting.select import shown_optimizer
from altgrad.reporting.wording import joined

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
#: The figures of all modules in the report's order.
FIGURES = sorted(DECLARED.values(), key=lambda spec: (SECTIONS.index(spec.section), spec.order, spec.name))
_drawn: Callable[[FigureSpec], bool]  # what a process does that was forked to draw; it could not be sent to it


def at(section: str, pictures: dict[str, Picture]) -> list[Picture]:
    """Return those of ``pictures`` that stand at ``section``, in their order."""
    if section not in SECTIONS:
        raise ValueError(f"no section {section!r}")
    return [pictures[spec.name] for spec in FIGURES if spec.section == section and spec.name in pictures]


def draw(specs: Sequence[FigureSpec], study: Study, result: Comparison, folder: Path) -> dict[str, Picture]:
    """Draw those of ``specs`` that have data as PNG and SVG in ``folder``; return their pictures by name.

    Files of figures that are not drawn are removed, so the folder holds what the report shows.
    """

    def drawn(spec: FigureSpec) -> bool:
        with drawing():
            figure = spec.draw(study, result)
            if figure is not None:
                save(figure, folder, spec.name)
        return figure is not None

    words = _words(study, result)
    pictures = {
        spec.name: Picture(
            spec.name, _sentence(spec.alt.format(**words)), _sentence(spec.caption.format(**words)),
            {"optimizer": words["optimizer"]} if "{optimizer}" in spec.caption else {},
        ) for spec, found in zip(specs, _on_all_cores(drawn, specs), strict=True) if found
    }  # fmt: skip
    for path in [*folder.glob("*.png"), *folder.glob("*.svg")]:
        if path.stem not in pictures:
            path.unlink()
    return pictures


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].strip()


def _on_all_cores(function: Callable[[FigureSpec], bool], specs: Sequence[FigureSpec]) -> list[bool]:
    """Return what ``function`` says of each spec. Drawing takes most of a report's time, and processes share it.

    They are forked, so that nothing is loaded or copied again; where that is not safe, there is only this one.
    """
    global _drawn
    _drawn, jobs = function, min(usable_cores(), len(specs))
    if sys.platform != "linux" or jobs < 2:
        return [function(spec) for spec in specs]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        found = pool.map(_call, specs, chunksize=1)
        pool.close()  # they end by themselves: the signal that else ends them is whoever's calls this
        pool.join()
    return found


def _call(spec: FigureSpec) -> bool:
    return _drawn(spec)


def _words(study: Study, result: Comparison) -> dict[str, str]:
    """Return what is filled in for the names that `in_report` knows."""
    rules = [rule for cell in study.resolved.values() for rule in every_rule(cell)]
    grads = {rule["grad"]["format"] for rule in rules if rule["grad"]}
    measure, gains = study.measure, result.gains.dropna(subset="claim")
    twins, spread = gains["beyond"].notna().any(), any(claim.half_width > 0 for claim in gains["claim"])
    return {
        "baseline": study.baseline or "the baseline",
        "optimizer": shown_optimizer(study, result),
        "entries": joined(study.formats),
        "grad": f"Incoming gradients are in {next(iter(grads))} in every column." if len(grads) == 1 else "",
        "beyond": f"Small hollow marks: the {measure.entry}-specific effect." if twins else "",
        "spread": ", with its 95 % interval" if spread else "",
        # Curves are of validation documents, and a classifier is compared on those of the test split.
        "short": measure.noun if measure.column == measure.on_validation else f"validation {measure.noun}",
        "noun": measure.full, "entry": measure.entry, "unit": measure.with_unit(""),
        "better": "right" if measure.higher_is_better else "left", "effect": f"{measure.smallest_effect:g}",
    }  # fmt: skip
