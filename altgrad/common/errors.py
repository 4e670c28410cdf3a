"""Errors that the user can mend, and the function that turns them into a sentence.

A mistake of the user (a misspelt format, a negative step count, an unreachable hub) raises :class:`UserError`, whose
message says *where* it is and *what to do*. :func:`run_stage` prints that message alone and exits non-zero. Any other
exception is a defect of the bench and keeps its traceback.
"""

from __future__ import annotations

import difflib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from altgrad.common.console import INTERRUPTED, STOPS, while_read
from altgrad.common.machine import settle_process

if TYPE_CHECKING:
    from pydantic import ValidationError

SHOWN = 100  # characters of a value in a sentence
STAYS = "; params.yaml keeps the setting: `git diff params.yaml` shows it, `git checkout params.yaml` undoes it"
DISK_FULL = "the disk is full"  # callers look for this in the message of a stage


class UserError(Exception):
    """A mistake in the input or the environment; ``str(error)`` is one clear sentence."""


class Stopped(KeyboardInterrupt):
    """Raised for an interrupt or SIGTERM; ``signum`` is the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def near_matches(name: object, known: Iterable[str]) -> list[str]:
    """Return at most three of ``known`` that are most like ``name``, the nearest first; case is ignored."""
    folded = {candidate.lower(): candidate for candidate in known}
    return [folded[near] for near in difflib.get_close_matches(str(name).strip().lower(), folded, n=3, cutoff=0.5)]


def did_you_mean(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return the end of an error message: ``"; did you mean E4M3 or E3M4?"``.

    Without a near match return ``otherwise``; if that is ``None``, all names, as ``"; known: E4M3, E5M2"``.
    """
    names = list(dict.fromkeys(known))
    if near := near_matches(name, names):
        return f"; did you mean {' or '.join(near)}?"
    if otherwise is None:
        return f"; known: {', '.join(names)}" if names else ""
    return otherwise


def sentences(error: ValidationError, source: str) -> list[str]:
    """Return a sentence for each problem of ``error``, such as ``"params.yaml: train.steps: is missing; add it"``."""
    found = []
    for problem in error.errors():
        if problem["type"] == "default_factory_not_called":  # follows from another problem in the list
            continue
        parts = [part for part in (source, _place(problem["loc"])) if part]
        found.append(": ".join([*parts, _sentence(problem)]))
    return list(dict.fromkeys(found))


def _place(location: tuple[int | str, ...]) -> str:
    """Return a problem's place as the user writes it: ``grid.formats[2]`` for ``("grid", "formats", 2)``."""
    if location[:1] in (("corpora",), ("models",), ("recipes",)):
        location = (*location[:2], *location[3:])  # the third part is the union's tag, not a setting
    place = ""
    for part in location:
        if part == "[key]":  # repeats the name in front of it
            continue
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += f".{part}" if place else part
    return place


def _sentence(problem: Mapping[str, Any]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "missing":
        return "is missing; add it"
    if problem["type"] == "value_error":
        return message
    if problem["type"] == "union_tag_invalid":
        discriminator, tag, expected = (problem["ctx"][name] for name in ("discriminator", "tag", "expected_tags"))
        return f"{discriminator.strip(chr(39))}: expected one of {expected}, not {tag!r}"
    if problem["type"] == "too_short":
        return f"expected at least {problem['ctx']['min_length']}, got {problem['ctx']['actual_length']}"
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected settings, such as {{name: value}}, not {_shown(problem['input'])}"
    return f"{message}, not {_shown(problem['input'])}"


def _shown(value: Any) -> str:
    """Return the first `SHOWN` characters of ``repr(value)``; for an int too long for ``repr``, say that it is."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too large to write"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _raise_when_stopped(stops: Iterable[signal.Signals]) -> None:
    """Make each signal of ``stops`` raise `Stopped`. Outside the main thread do nothing.

    Processes that this one forks ignore these signals, so this process can end its pool in good order.
    """
    parent = os.getpid()

    def stop(signum: int, frame: object) -> None:
        if os.getpid() == parent:
            raise Stopped(signum)

    if threading.current_thread() is threading.main_thread():
        for signum in stops:
            signal.signal(signum, stop)


def run_stage(main: Callable[[list[str]], None], *, stops: Iterable[signal.Signals] = (signal.SIGINT,)) -> None:
    """Run a stage's ``main(argv)``; a :class:`UserError` ends the process with one line and status 1.

    `settle_process` runs first. It only helps before torch is loaded, so a stage imports torch inside ``main``.

    A signal of ``stops`` ends the process with one sentence and status 128 + signal. Where DVC runs the stage, the
    command that started DVC prints this sentence instead. Put SIGTERM into ``stops`` only where no pool is forked: a
    process that is just being forked would miss it.

    A full disk is the one operating-system error with a sentence of its own. Every file is written under a temporary
    name first, so no complete file is lost.
    """
    settle_process()
    _raise_when_stopped(stops)
    with while_read():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt as stopped:
            for signum in STOPS:
                signal.signal(signum, signal.SIG_DFL)  # a second interrupt ends it at once
            if "DVC_STAGE" not in os.environ:
                print(INTERRUPTED, file=sys.stderr)
            sys.exit(128 + (stopped.signum if isinstance(stopped, Stopped) else signal.SIGINT))
        except UserError as error:
            # `dvc exp run -S` has written the setting there, and does not undo it.
            stays = str(error).startswith("params.yaml: ") and "DVC_EXP_NAME" in os.environ
            sys.exit(f"error: {error}{STAYS if stays else ''}")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            place = f" while writing {error.filename}" if error.filename else ""
            sys.exit(
                f"error: {DISK_FULL}{place}; free some space and run the same command again: "
                "finished work is kept and training resumes from its last checkpoint"
            )
