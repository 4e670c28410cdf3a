"""The processes that this one has started, and their own, ended when a person has interrupted it."""

from __future__ import annotations

import time
from contextlib import suppress

import psutil

END_S = 1.0  # that a process which was interrupted has to end by itself


def stop_children() -> None:
    """End the processes that this one has started; those of a terminal have been interrupted with it."""
    left = _at_work(psutil.Process().children(recursive=True), END_S)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for child in left:
            with suppress(psutil.NoSuchProcess):
                end(child)
        left = _at_work(left, 10 * END_S)


def _at_work(children: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return which are still at work after so many seconds, or none as soon as none is.

    They are looked at, not waited for: whoever else asked for the status of one, as DVC does for its stage's, would be
    told that it had ended well.
    """
    ends = time.monotonic() + seconds
    while left := [child for child in children if _works(child)]:
        if time.monotonic() > ends:
            break
        time.sleep(0.05)
    return left


def _works(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
