"""How many cells share a GPU: as many as its memory holds of what such cells were measured to take.

None has been measured before a study's first run: until then each has a GPU of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from altgrad.config.files import read_json

MARGIN, CONTEXT_MB = 1.25, 600.0  # for fragments of what torch has reserved, and for what CUDA itself takes


def measured_mb(model: dict[str, Any], batch: int) -> float | None:
    """Return the most GPU memory, MB (10^6 bytes), that a cell of this grid took on one; None if none has run there.

    Only cells of this ``model``, by its settings in params.yaml, and of this ``train.batch`` count.
    """
    peaks = []
    for path in Path("data/grid").glob("*.json"):
        timing = Path("data/runs") / path.stem / "timing.json"
        if timing.exists():
            cell, took = read_json(path), read_json(timing)
            same = model.items() <= cell["model"].items() and cell["train"]["batch"] == batch
            if took["device"] == "cuda" and same:
                peaks.append(took["peak_memory_mb"])
    return max(peaks, default=None)


def cells_on(total_mb: float, cell_mb: float | None) -> int:
    """Return how many cells that take ``cell_mb`` each a GPU with ``total_mb`` holds; one if that is not known."""
    return 1 if cell_mb is None else max(1, int(total_mb // (MARGIN * cell_mb + CONTEXT_MB)))
