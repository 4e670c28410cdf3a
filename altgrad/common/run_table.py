"""``altgrad.record``: add a row to a table of runs, from any script; ``altgrad compare`` reads such tables.

This module imports nothing slow, because a training script should not wait for it.
"""

import csv
import errno
import fcntl
import io
import math
import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, SupportsFloat, SupportsIndex

KEY, STEP = ["configuration", "optimizer", "seed"], "step"
DIVERGED = "diverged"  # written for a loss that is not finite


def record(
    path: str | os.PathLike[str],
    *,
    configuration: str,
    optimizer: str,
    seed: SupportsIndex,
    loss: SupportsFloat,
    step: SupportsIndex | None = None,
    **others: SupportsFloat,
) -> None:
    """Add a run's loss as a row to the CSV file ``path``. A missing file or folder is made.

    Several processes may call this at once while `altgrad compare` reads: every reader sees whole rows. A row of the
    same configuration, optimizer, seed and step is replaced, so a script that is run again leaves no second row.

    Args:
        path: the file. All its rows have the columns of the first row.
        configuration: the run's configuration, as the report will name it.
        optimizer: the run's optimizer, as the report will name it.
        seed: the run's seed. Runs of one seed are paired, so a seed should fix the same weights and batches in all.
        loss: the final loss, or the loss after ``step``; a loss that is not finite is written as "diverged".
        step: the step of this loss. Curves and final losses need a file each: rows of final losses have no step.
        others: values of more columns, such as ``accuracy``.

    Raises:
        ValueError: a name is empty, has spaces around it or has two lines; or the file has other columns.
    """
    for name, text in {"configuration": configuration, "optimizer": optimizer}.items():
        if not text or text != text.strip() or len(text.splitlines()) > 1:
            raise ValueError(f"{name}: expected a name on one line, without spaces around it, got {text!r}")
    steps = {} if step is None else {STEP: operator.index(step)}
    key = [configuration, optimizer, operator.index(seed), *steps.values()]
    losses = {name: float(value) for name, value in {"loss": loss, **others}.items()}
    header = _line([*KEY, *steps, *losses])
    values = [repr(value) if math.isfinite(value) else DIVERGED for value in losses.values()]
    start, row = _line(key)[:-1] + b",", _line([*key, *values])
    with _locked(Path(os.path.realpath(path))) as file:
        lines = file.read().splitlines(keepends=True) or [header]
        if lines[0].rstrip() != header.rstrip():
            columns = lines[0].decode(errors="replace").strip()
            raise ValueError(f"{path} has the columns {columns}; this row has {header.decode().strip()}")
        kept = [line for line in lines if not line.startswith(start)]
        if len(kept) == len(lines) and lines[-1].endswith(b"\n") and file.tell():
            size = file.tell()
            if file.write(row) < len(row):  # the disk is full
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        else:
            from altgrad.common.files import replacing  # a tenth of a second to import

            with replacing(Path(file.name)) as temporary:
                temporary.write_bytes(b"".join(line.rstrip(b"\r\n") + b"\n" for line in kept) + row)


def read_locked(path: Path) -> bytes:
    """Wait until no `record` writes to ``path``, then return the file's bytes: every row is whole."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        return file.read()


def _line(values: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Yield ``path``, opened under an exclusive lock; a file that was replaced during the wait is opened again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with open(path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.seek(0)
                yield file
                return
