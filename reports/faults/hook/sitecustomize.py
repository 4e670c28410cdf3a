# ruff: noqa: INP001, ANN001, ANN002, ANN003, ANN201, ANN202 - a folder of PYTHONPATH, and no package
"""What every Python process of a command under test runs first: it stops the command at the moment that FAULT names.

A moment is a pattern of paths. The first process to rename a file onto a path that matches sends the command the
signal, once. DVC writes its rwlock in place: there the moment is after it was opened, when it is empty.
"""

import builtins
import os
import re
import signal
import sys
import time


def arm(pattern, signum, place):
    """Send ``signum`` to the command, and with SIGKILL end this process too, at the first path of ``pattern``."""
    moment = re.compile(pattern)
    main = os.path.join(place, "main")
    if "altgrad.execution" in sys.orig_argv[:3]:
        with open(main, "w") as file:
            file.write(str(os.getpid()))

    def at(path):
        if moment.search(os.path.abspath(os.fspath(path))) and first(place):
            with opened(main) as file:
                stop(int(file.read()), signum)

    def watched(rename):
        def renaming(source, target, *arguments, **options):
            at(target)
            return rename(source, target, *arguments, **options)

        return renaming

    def opening(path, mode="r", *arguments, **options):
        file = opened(path, mode, *arguments, **options)
        if "w" in mode and str(path).endswith("rwlock"):
            at(path)
        return file

    opened = builtins.open
    builtins.open, os.replace, os.rename = opening, watched(os.replace), watched(os.rename)


def first(place):
    """Return whether this is the first process to be there."""
    try:
        os.close(os.open(os.path.join(place, "fired"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def stop(main, signum):
    """Stop the command: with SIGINT as a terminal does, with SIGTERM as `kill` does, with SIGKILL as a crash does."""
    if signum == signal.SIGINT:
        os.killpg(os.getpgid(main), signum)
    else:
        os.kill(main, signum)
    if signum == signal.SIGKILL:
        os.kill(os.getpid(), signum)
    time.sleep(0.5)  # so that it arrives in here


if "FAULT" in os.environ:
    arm(os.environ["FAULT"], int(os.environ["FAULT_SIGNAL"]), os.environ["FAULT_PLACE"])
