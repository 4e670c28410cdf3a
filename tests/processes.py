"""Processes that do a thing together, and what is said where one of them fails or all of them hang."""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessException, start_processes

PATIENCE = 600.0  # seconds, on a machine that has much else to do; less than a test's own


def together(
    work: Callable[..., None], count: int, folder: Path, *arguments: Any, loads: str, patience: float = PATIENCE
) -> None:
    """Call ``work(rank, *arguments)`` in ``count`` processes; where one fails, the others are ended.

    One server has loaded torch and the module ``loads`` for all of them. Raises RuntimeError with the traceback of the
    process that failed, or after ``patience`` seconds with where each of them is, which is written to ``folder``.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([loads])
    processes = start_processes(
        _work, (work, folder, patience, arguments), count, start_method="forkserver", join=False
    )  # fmt: skip
    try:
        while not processes.join(grace_period=5):
            pass
    except ProcessException as error:
        places = [f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("place*")) if path.stat().st_size]
        raise RuntimeError("\n".join([str(error), *places])) from None


def _work(rank: int, work: Callable[..., None], folder: Path, patience: float, arguments: tuple[Any, ...]) -> None:
    with open(folder / f"place{rank}", "w") as place:
        faulthandler.dump_traceback_later(patience, exit=True, file=place)
        work(rank, *arguments)
        faulthandler.cancel_dump_traceback_later()
