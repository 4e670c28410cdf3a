"""The analyses, found in the modules of this folder: each declares its own as ``ANALYSES``, below the functions."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from altgrad.diagnostics.analysis import Analysis
from altgrad.metrics import METRICS

FIRST = ("weights", "gradients", "geometry")  # modules whose rows come first in a diagnosis
USERS = ("registry", "diagnose", "__main__")  # of this table


def _declared() -> tuple[Analysis, ...]:
    """Return the analyses of all modules, each checked to have one row and no more."""
    package = __name__.rpartition(".")[0]
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    names = [*FIRST, *(name for name in names if name not in (*FIRST, *USERS))]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    found = tuple(analysis for module in modules for analysis in getattr(module, "ANALYSES", ()))
    for analysis in found:
        name, row = analysis.name, analysis.row
        if [other.name for other in found].count(name) > 1 or (row is not None and name in METRICS):
            raise ValueError(f"metric {name} has two homes")
        if row is None and name not in METRICS:
            raise ValueError(f"metric {name} has no row: give its analysis one")
        if row is not None and (row.name != name or row.offline is None):
            raise ValueError(f"metric {name}: its row must have the name of its function, and the role as offline")
    return found


ANALYSES = _declared()
