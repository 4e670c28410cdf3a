"""The report's figures: found in the modules of this folder, drawn, and put where they say that they stand.

A module declares its figures as ``FIGURES``, beside the functions that draw them. A figure whose data the grid does not
have is left out, and so is its place in the report. Records of `make bench` have a figure each.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from altgrad.config.process import usable_cores
from altgrad.reporting.compare import Comparison
from altgrad.reporting.document import Picture
from altgrad.reporting.figures.select import shown_optimizer
from altgrad.reporting.figures.spec import SECTIONS, FigureSpec
from altgrad.reporting.figures.style import drawing, save
from altgrad.reporting.load import Study
from altgrad.reporting.wording import joined


def _declared() -> list[FigureSpec]:
    """Return the figures of all modules in the report's order."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.name != "__main__"]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    specs = [spec for module in modules for spec in getattr(module, "FIGURES", ())]
    called = [spec.name for spec in specs]
    if twice := {name for name in called if called.count(name) > 1}:
        raise ValueError(f"two figures are called {' and '.join(sorted(twice))}")
    return sorted(specs, key=lambda spec: (SECTIONS.index(spec.section), spec.order, spec.name))


FIGURES = _declared()
_work: tuple[Callable[[FigureSpec], bool], Sequence[FigureSpec]]  # what this process draws, if it was forked to draw


def at(section: str, pictures: dict[str, Picture]) -> list[Picture]:
    """Return those of ``pictures`` that stand at ``section``, in their order."""
    if section not in SECTIONS:
        raise ValueError(f"no section {section!r}")
    return [pictures[spec.name] for spec in FIGURES if spec.section == section and spec.name in pictures]


def draw_all(study: Study, result: Comparison, folder: Path, silent: Collection[FigureSpec]) -> dict[str, Picture]:
    """Draw every figure that has data as PNG and SVG in ``folder``; return their pictures by name.

    Those in ``silent``, see :func:`quiet`, are left out. Files of figures that are not drawn are removed, so the folder
    holds what the report shows.
    """
    told = [spec for spec in FIGURES if spec not in silent]
    pictures = draw(told, study, result, folder)
    for path in folder.glob("*.*") if folder.is_dir() else ():
        if path.suffix in (".png", ".svg") and path.stem not in pictures:
            path.unlink()
    return pictures


def quiet(study: Study, result: Comparison) -> list[FigureSpec]:
    """Return the figures without findings in this study; ``python -m altgrad.reporting.figures`` draws them too."""
    return [spec for spec in FIGURES if spec.findings is not None and not spec.findings.found(study, result)]


def draw(specs: Iterable[FigureSpec], study: Study, result: Comparison, folder: Path) -> dict[str, Picture]:
    """Draw those of ``specs`` that have data as PNG and SVG in ``folder``; return their pictures by name."""
    words, specs = _words(study, result), list(specs)

    def drawn(spec: FigureSpec) -> bool:
        with drawing():
            figure = spec.draw(study, result)
            if figure is not None:
                save(figure, folder, spec.name)
        return figure is not None

    def behind(spec: FigureSpec) -> dict[str, str]:
        return {"optimizer": words["optimizer"]} if "{optimizer}" in spec.caption else {}

    return {
        spec.name: Picture(spec.name, spec.alt.format(**words), spec.caption.format(**words).strip(), behind(spec))
        for spec, found in zip(specs, _on_all_cores(drawn, specs), strict=True)
        if found
    }


def _on_all_cores(function: Callable[[FigureSpec], bool], specs: Sequence[FigureSpec]) -> list[bool]:
    """Return what ``function`` says of each spec. Drawing takes most of a report's time, and processes share it.

    They are forked, so that nothing is loaded or copied again; where that is not safe, there is only this one.
    """
    jobs = min(usable_cores(), len(specs))
    if sys.platform != "linux" or jobs < 2:
        return [function(spec) for spec in specs]
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, initializer=_begin, initargs=(function, specs)) as pool:
        return pool.map(_call, range(len(specs)), chunksize=1)


def _begin(function: Callable[[FigureSpec], bool], specs: Sequence[FigureSpec]) -> None:
    """Keep what a forked process has to do; it could not be sent to it."""
    global _work  # noqa: PLW0603 - of this process alone
    _work = function, specs


def _call(index: int) -> bool:
    function, specs = _work
    return function(specs[index])


def _words(study: Study, result: Comparison) -> dict[str, str]:
    optimizer = shown_optimizer(study, result)
    grads = {rule["grad"]["format"] for cell in study.resolved.values() for rule in cell["rules"] if rule["grad"]}
    same = f"Incoming gradients are in {next(iter(grads))} in every column." if len(grads) == 1 else ""
    gains = result.gains
    twins = len(gains) > 0 and gains.dropna(subset="claim")["beyond"].notna().any()
    hollow = "Small hollow marks: the format-specific effect."
    others = [name for name in study.formats if name != study.baseline] or study.formats
    return {
        "baseline": study.baseline or "the baseline",
        "optimizer": optimizer,
        "formats": joined(others),
        "entries": joined(study.formats),
        "grad": same,
        "beyond": hollow if twins else "",
    }
