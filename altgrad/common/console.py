"""Commands: how one was called, how a signal ends it, and how it ends when nobody reads its output (``| head``)."""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted; run the same command again, it goes on where it was"
STOPS = (signal.SIGINT, signal.SIGTERM)
UNREAD = 128 + signal.SIGPIPE  # the status that a shell reports for a program that SIGPIPE has ended


def called(module: str) -> str:
    """Return the command of ``module`` as the user typed it: ``python -m altgrad.config``, else ``altgrad config``."""
    written = f"{' '.join(sys.orig_argv)} "
    ways = (f"-m altgrad.{module}", f"-m altgrad {module}")
    return next((f"python {way}" for way in ways if f" {way} " in written), f"altgrad {module}")


def end_when_stopped() -> None:
    """Make an interrupt and SIGTERM end the process with one sentence. Call this before modules are loaded."""

    def end(signum: int, frame: object) -> None:
        os.write(sys.stderr.fileno(), f"{INTERRUPTED}\n".encode())
        os._exit(128 + signum)

    for signum in STOPS:
        signal.signal(signum, end)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let each signal of `STOPS` call ``handler(signum, frame)`` inside the block; then restore the old handlers."""
    before = {signum: signal.signal(signum, handler) for signum in STOPS}
    try:
        yield
    finally:
        for signum, handler_before in before.items():
            signal.signal(signum, handler_before)


@contextmanager
def while_read() -> Iterator[None]:
    """End the process silently with status `UNREAD` when nobody reads its standard output any more.

    SIGPIPE itself stays ignored, as in any Python process, because it would also end a run whose worker has died. Any
    other broken pipe raises ``BrokenPipeError``.
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
