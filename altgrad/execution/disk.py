"""What cells will take of the disk, and whether that is free, before any of them trains."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from altgrad.common.errors import UserError
from altgrad.common.files import read_json
from altgrad.execution.executor import Task

DATA = Path("data")
FLOAT = 4  # bytes of a weight as it is saved
# Checkpoints: the two that are kept and the one that is being written; of weights, and two moments of each.
CHECKPOINTS, MOMENTS = 3, 2
ROWS = 100_000  # bytes of a cell for what does not grow with its weights: rows of monitors, history, diagnosis


def weights_of(model: dict[str, Any], vocabulary: int) -> int:
    """Return the number of a model's weights, its head tied to the embedding; biases and norms are not counted."""
    width = model["width"]
    return width * (vocabulary + model["context"] + model["layers"] * (4 + 2 * model["mlp_ratio"]) * width)


def cell_bytes(cell: dict[str, Any], vocabulary: int) -> int:
    """Return about how many bytes a finished cell keeps: its weights, their snapshots, and the gradient twice."""
    return ROWS + FLOAT * int(weights_of(cell["model"], vocabulary)) * (1 + cell["monitor"]["probes"] + 2)


def scratch_bytes(cell: dict[str, Any], vocabulary: int) -> int:
    """Return about how many bytes a cell needs besides while it trains: checkpoints and snapshots."""
    copies = CHECKPOINTS * (1 + MOMENTS) + cell["monitor"]["probes"]
    return FLOAT * int(weights_of(cell["model"], vocabulary)) * copies


def needed(tasks: Sequence[Task], jobs: int) -> int:
    """Return about how many bytes ``tasks`` will take, ``jobs`` of them at a time.

    DVC's cache and data/ share what they hold, but for a file system without hard links: there it stands twice.
    """
    keys = list(dict.fromkeys(task.key for task in tasks if task.stage == "train"))
    cells = [read_json(DATA / f"grid/{key}.json") for key in keys]
    vocabulary = read_json(DATA / "tokens/meta.json")["vocab_size"] if cells else 0
    kept = sum(cell_bytes(cell, vocabulary) for cell in cells)
    at_work = sorted((scratch_bytes(cell, vocabulary) for cell in cells), reverse=True)[:jobs]
    return kept * (1 if has_links(DATA) else 2) + sum(at_work)


def has_links(folder: Path) -> bool:
    """Return whether a file in ``folder`` can have a second name."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".links-") as place:
        file = Path(place, "file")
        file.touch()
        try:
            os.link(file, file.with_name("link"))
        except OSError:
            return False
    return True


def said(need: int) -> str:
    """Return what is needed and what is free, as the end of a sentence."""
    return f"about {size(need)} of disk, of which {size(_free())} are free"


def require_room(tasks: Sequence[Task], jobs: int) -> None:
    """Raise :class:`UserError` if ``tasks`` need more disk than is free, with what makes room."""
    need, free = needed(tasks, jobs), _free()
    if need > free:
        raise UserError(
            f"the cells that have to run need {said(need)}, {size(need - free)} too few; `dvc gc -w` removes "
            "cached results of other settings, and `monitor.probes: 1` keeps fewer snapshots"
        )


def size(count: float) -> str:
    """Return a number of bytes such as ``820 kB``, ``84 MB`` or ``1.2 GB``."""
    power = 1 if count < 999_500 else 2 if count < 999.5e6 else 3
    count /= 1000**power
    return f"{count:.{1 if count < 9.95 else 0}f} {' kMG'[power]}B"


def _free() -> int:
    return shutil.disk_usage(".").free
