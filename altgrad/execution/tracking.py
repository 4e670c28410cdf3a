"""The process that tells trackers of the cells while they train: beside them, so that none waits for a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from altgrad.common.errors import UserError
from altgrad.execution.executor import LOGS

COMMAND = [sys.executable, "-m", "altgrad.watch.track"]
LOG = LOGS / "tracking.log"
PATIENCE = 60  # seconds that trackers have to send the last rows


@contextmanager
def tracked(trackers: Sequence[str]) -> Iterator[None]:
    """Have ``trackers`` told of what goes on inside.

    Raises :class:`UserError` if one is not installed. One that fails later is named at the end, and stops nothing.
    """
    if not trackers:
        yield
        return
    checked = subprocess.run([*COMMAND, "--check"], check=False, stderr=subprocess.PIPE, text=True)
    if checked.returncode:
        raise UserError(checked.stderr.strip().removeprefix("error: "))
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with open(LOG, "wb") as log:
        # In a session of its own: an interrupt from the keyboard is for the cells, and it tells of their end.
        process = subprocess.Popen(
            [*COMMAND, "--until-closed"], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            print(f"notice: trackers were not told of everything; {LOG} says why, and", file=sys.stderr)
            print("python -m altgrad.watch.track tells them the rest", file=sys.stderr)
