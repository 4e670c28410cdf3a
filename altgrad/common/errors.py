"""Errors that are the user's to fix, and the one place that turns them into a sentence.

Everything a user can get wrong (a misspelt format, a negative step count, an unreachable hub) raises :class:`UserError`
with a message that says *where* and *what to do*. A stage wrapped in :func:`run_stage` prints that message alone and
exits non-zero. Any other exception is a defect of the bench and keeps its traceback.
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
from altgrad.common.threads import settle_process

if TYPE_CHECKING:
    from pydantic import ValidationError

SHOWN = 100  # characters of a value in a sentence
STAYS = "; params.yaml keeps the setting: `git diff params.yaml` shows it, `git checkout params.yaml` undoes it"
DISK_FULL = "the disk is full"  # which whoever reads the message of a stage may look for


class UserError(Exception):
    """A mistake in the input or the environment; ``str(error)`` is one clear sentence."""


class Stopped(KeyboardInterrupt):
    """An interrupt or SIGTERM, by its number ``signum``."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def near_matches(name: object, known: Iterable[str]) -> list[str]:
    """Return those of ``known`` that are most like ``name``, at most three, the nearest first.

    The comparison ignores case, because ``e4m3`` for ``E4M3`` is the commonest slip.
    """
    folded = {candidate.lower(): candidate for candidate in known}
    return [folded[near] for near in difflib.get_close_matches(str(name).strip().lower(), folded, n=3, cutoff=0.5)]


def did_you_mean(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """Return ``"; did you mean E4M3 or E3M4?"``; without a near match ``otherwise``, or else the known names."""
    names = list(dict.fromkeys(known))
    if near := near_matches(name, names):
        return f"; did you mean {' or '.join(near)}?"
    if otherwise is None:
        return f"; known: {', '.join(names)}" if names else ""
    return otherwise


def sentences(error: ValidationError, source: str) -> list[str]:
    """Return what is wrong as sentences, each with ``source`` and the setting in front of it."""
    found = []
    for problem in error.errors():
        if problem["type"] == "default_factory_not_called":  # because of another problem, which is said
            continue
        parts = [part for part in (source, _place(problem["loc"])) if part]
        found.append(": ".join([*parts, _sentence(problem)]))
    return list(dict.fromkeys(found))


def _place(location: tuple[int | str, ...]) -> str:
    """Return ``grid.formats[2]`` for ``("grid", "formats", 2)``."""
    if location[:1] in (("corpora",), ("models",), ("recipes",)):
        location = (*location[:2], *location[3:])  # the third part is the union's tag, not a setting
    place = ""
    for part in location:
        if part == "[key]":  # a name in front of a section's settings, which stands before it already
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
    """Return the beginning of ``value`` as Python writes it, which it does not for a number of 5,000 digits."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} too large to write"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _raise_when_stopped(stops: Iterable[signal.Signals]) -> None:
    """Have these signals raise `Stopped`; a thread beside the main one has no say in it.

    A process that is forked from this one leaves them to it, which ends a pool in good order.
    """
    own = os.getpid()

    def stop(signum: int, frame: object) -> None:
        if os.getpid() == own:
            raise Stopped(signum)

    if threading.current_thread() is threading.main_thread():
        for signum in stops:
            signal.signal(signum, stop)


def run_stage(main: Callable[[list[str]], None], *, stops: Iterable[signal.Signals] = (signal.SIGINT,)) -> None:
    """Run a stage's ``main(argv)``; a :class:`UserError` ends the process with one line and status 1.

    The process is settled first, which only helps before torch is loaded: a stage imports it inside ``main``.

    An interrupt ends it with one sentence too and status 128 + signal; without a word where DVC runs the stage, since
    whoever runs DVC says it. ``stops``: all signals that do. SIGTERM may be one only where no pool is forked: it ends
    a pool's processes with it, and one that is just being forked would miss it.

    A full disk is the one operating-system error with an answer of its own: every file is written
    under a temporary name first, so nothing that was complete is lost.
    """
    settle_process()
    _raise_when_stopped(stops)
    with while_read():
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt as stopped:
            for signum in STOPS:
                signal.signal(signum, signal.SIG_DFL)  # whoever stops it again need not wait for its end
            if "DVC_STAGE" not in os.environ:
                print(INTERRUPTED, file=sys.stderr)
            sys.exit(128 + (stopped.signum if isinstance(stopped, Stopped) else signal.SIGINT))
        except UserError as error:
            # `dvc exp run -S` has written the setting there, and leaves it.
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
