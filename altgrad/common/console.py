"""How a command was called, one that is stopped, and one whose reader leaves, as ``head`` does."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted; run the same command again, it goes on where it was"
STOPS = (signal.SIGINT, signal.SIGTERM)
UNREAD = 128 + signal.SIGPIPE  # what a shell says of a program that the signal has ended


def called(module: str) -> str:
    """Return the command that runs ``altgrad.<module>``, as the user of this process wrote it, without arguments."""
    written = f"{' '.join(sys.orig_argv)} "
    ways = (f"-m altgrad.{module}", f"-m altgrad {module}")
    return next((f"python {way}" for way in ways if f" {way} " in written), f"altgrad {module}")


def end_when_stopped() -> None:
    """Have an interrupt and SIGTERM end the process with a sentence while its modules are loaded.

    Python would show where it was, in a library that nobody has asked for.
    """

    def end(signum: int, frame: object) -> None:
        os.write(sys.stderr.fileno(), f"{INTERRUPTED}\n".encode())
        os._exit(128 + signum)

    for signum in STOPS:
        signal.signal(signum, end)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call ``handler(signum, frame)`` for each of `STOPS`, and leave them afterwards to whoever had them before."""
    before = {signum: signal.signal(signum, handler) for signum in STOPS}
    try:
        yield
    finally:
        for signum, handler_before in before.items():
            signal.signal(signum, handler_before)


@contextmanager
def while_read() -> Iterator[None]:
    """End the process with `UNREAD` and without a word when nobody reads standard output any more.

    The signal itself stays ignored, as Python has it: it would also end a run whose worker has died. Any other pipe
    that breaks raises ``BrokenPipeError`` as ever.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread(sys.stdout.fileno()):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(UNREAD)


def _is_unread(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
