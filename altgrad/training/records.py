"""What a run writes: tidy rows while it goes, and its output files at the end.

Rows are appended to JSON-lines files in the scratch directory as they happen, and can be read there. A resumed run
drops the rows after its checkpoint and writes them again, so the finished files do not show the interruption.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow
from safetensors.torch import save
from torch import Tensor

from altgrad.common.files import replacing, write_rows
from altgrad.config.tasks import HISTORY
from altgrad.optim.code_weights import plain
from altgrad.training.monitor import Row


class RowLog:
    """An append-only list of JSON rows, each with its ``step`` first."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """Open ``path``; keep the rows up to ``resume_step``, or none when it is ``None``."""
        self.path = path
        kept = []
        if resume_step is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= resume_step]
        with replacing(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        # Open as long as the run. Line by line, for whoever watches.
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def append(self, row: Sequence[Any]) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def extend(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows; a number that JSON cannot hold (NaN, infinity) becomes null."""
        for row in rows:
            self.append([None if isinstance(v, float) and not math.isfinite(v) else v for v in row])

    def sync(self) -> None:
        """Return when every row so far is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def rows(self) -> list[list[Any]]:
        self.sync()
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    def close(self) -> None:
        self._file.close()


def _step(line: str) -> float:
    """Return the step of a row; a line cut off by a kill is after every step."""
    try:
        return json.loads(line)[0]
    except json.JSONDecodeError:
        return float("inf")


def write_history(path: Path, rows: list[list[Any]], measured: Sequence[str] = ()) -> None:
    """Write ``history.csv``: one row per logged step, empty where a value was not measured.

    ``measured`` are the columns behind those of every run. A run whose recipe changes has a column more: the ``recipe``
    that is on.
    """
    columns = [*HISTORY, *measured, "recipe"]
    frame = pd.DataFrame(rows, columns=columns[: len(rows[0])] if rows else columns[:-1])
    with replacing(path) as temporary:
        frame.to_csv(temporary, index=False, lineterminator="\n")


def write_monitors(path: Path, rows: list[list[Any]]) -> None:
    """Write ``monitors.parquet``: tidy rows step, layer, role, metric, value."""
    types = [pyarrow.int64(), pyarrow.string(), pyarrow.string(), pyarrow.string(), pyarrow.float64()]
    write_rows(path, rows, pyarrow.schema(zip(Row._fields, types, strict=True)))


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write ``rows``, the names of the columns first, to the CSV file ``path`` atomically, each as it comes."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write ``tensors``, from any device, to ``path`` atomically.

    Serialised in memory first: safetensors' own writer reports a full disk as an error without a
    number, which could not be told from a defect.
    """
    content = save({name: plain(t).detach().cpu().contiguous() for name, t in tensors.items()}, metadata)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
