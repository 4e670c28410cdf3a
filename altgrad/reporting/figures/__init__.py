"""The report's figures: found in the modules of this folder, drawn, and put where they say that they stand.

A module declares its figures as ``PLATES``, beside the functions that draw them. A figure whose data the grid does not
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
from altgrad.reporting.figures.plate import SPOTS, Plate
from altgrad.reporting.figures.select import shown_optimizer
from altgrad.reporting.figures.style import drawing, save
from altgrad.reporting.load import Study
from altgrad.reporting.wording import joined


def _declared() -> list[Plate]:
    """Return the figures of all modules in the report's order."""
    names = [found.name for found in pkgutil.iter_modules(__path__) if found.name != "__main__"]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    plates = [plate for module in modules for plate in getattr(module, "PLATES", ())]
    called = [plate.name for plate in plates]
    if twice := {name for name in called if called.count(name) > 1}:
        raise ValueError(f"two figures are called {' and '.join(sorted(twice))}")
    return sorted(plates, key=lambda plate: (SPOTS.index(plate.spot), plate.order, plate.name))


PLATES = _declared()
_work: tuple[Callable[[Plate], bool], Sequence[Plate]]  # what this process draws, if it was forked to draw


def at(spot: str, pictures: dict[str, Picture]) -> list[Picture]:
    """Return those of ``pictures`` that stand at ``spot``, in their order."""
    if spot not in SPOTS:
        raise ValueError(f"no spot {spot!r}")
    return [pictures[plate.name] for plate in PLATES if plate.spot == spot and plate.name in pictures]


def draw_all(
    study: Study, result: Comparison, folder: Path, silent: Collection[Plate]
) -> dict[str, Picture]:
    """Draw every figure that has data as PNG and SVG in ``folder``; return their pictures by name.

    Those in ``silent``, see :func:`quiet`, are left out. Files of figures that are not drawn are removed, so the folder
    holds what the report shows.
    """
    told = [plate for plate in PLATES if plate not in silent]
    pictures = draw(told, study, result, folder)
    for path in folder.glob("*.*") if folder.is_dir() else ():
        if path.suffix in (".png", ".svg") and path.stem not in pictures:
            path.unlink()
    return pictures


def quiet(study: Study, result: Comparison) -> list[Plate]:
    """Return the figures that this study has no news for; ``python -m altgrad.reporting.figures`` draws them too."""
    return [plate for plate in PLATES if plate.news is not None and not plate.news.found(study, result)]


def draw(plates: Iterable[Plate], study: Study, result: Comparison, folder: Path) -> dict[str, Picture]:
    """Draw those of ``plates`` that have data as PNG and SVG in ``folder``; return their pictures by name."""
    words, plates = _words(study, result), list(plates)

    def drawn(plate: Plate) -> bool:
        with drawing():
            figure = plate.draw(study, result)
            if figure is not None:
                save(figure, folder, plate.name)
        return figure is not None

    def behind(plate: Plate) -> dict[str, str]:
        return {"optimizer": words["optimizer"]} if "{optimizer}" in plate.caption else {}

    return {
        plate.name: Picture(plate.name, plate.alt.format(**words), plate.caption.format(**words).strip(), behind(plate))
        for plate, found in zip(plates, _on_all_cores(drawn, plates), strict=True)
        if found
    }


def _on_all_cores(function: Callable[[Plate], bool], plates: Sequence[Plate]) -> list[bool]:
    """Return what ``function`` says of each plate. Drawing takes most of a report's time, and processes share it.

    They are forked, so that nothing is loaded or copied again; where that is not safe, there is only this one.
    """
    jobs = min(usable_cores(), len(plates))
    if sys.platform != "linux" or jobs < 2:
        return [function(plate) for plate in plates]
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, initializer=_begin, initargs=(function, plates)) as pool:
        return pool.map(_call, range(len(plates)), chunksize=1)


def _begin(function: Callable[[Plate], bool], plates: Sequence[Plate]) -> None:
    """Keep what a forked process has to do; it could not be sent to it."""
    global _work  # noqa: PLW0603 - of this process alone
    _work = function, plates


def _call(index: int) -> bool:
    function, plates = _work
    return function(plates[index])


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
