"""A process of the local pool: it runs one task after another, until nobody is there to give it the next.

Loading the libraries, this project and a compiled graph takes longer than a small cell trains, and all of them serve
the next cell as they are. What a task leaves behind otherwise is put back: signal handlers, output, memory. One that
fails is the last of its process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path


def serve(connection: Connection, environment: dict[str, str]) -> None:
    """Run each task (stage, key, log) that comes; answer with its exit status and the bytes of memory kept after it."""
    os.setsid()  # an interrupt from the keyboard reaches it through its parent, once
    os.environ.update(environment)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    # Left to the system, SIGTERM would end the process at once, and what it shares with its parent would be lost with a
    # warning.
    signal.signal(signal.SIGTERM, _raise)
    try:
        _serve(connection)
    except KeyboardInterrupt:  # between two tasks, or before one's answer
        sys.exit(128 + signal.SIGTERM)


def _serve(connection: Connection) -> None:
    first = True
    while True:
        try:
            stage, key, log = connection.recv()
        except EOFError:
            return
        status = _run(stage, key, log)
        gc.collect()  # a model, its optimizer and its graph refer to one another
        if first:
            gc.freeze()  # libraries stay: looking through them again takes 0.3 to 0.5 s, a small model's thirty steps
            first = False
        connection.send((status, resident_bytes()))


def _stop_with_parent() -> None:
    """Stop the task, which then writes a checkpoint, once the process that gives tasks is gone.

    That is not the one that this was forked from: a server of processes lives as long as those that it has forked.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def resident_bytes() -> int:
    """Return the memory of this process that is in use, in bytes; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def _raise(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(signum)


def _run(stage: str, key: str, log: str) -> int:
    """Do what ``python -m stages.train KEY > LOG`` would do, in this process; return its exit status."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = [key]
    try:
        runpy.run_module(f"stages.{stage}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        return 128 + (stopped.args[0] if stopped.args else signal.SIGINT)
    except Exception:  # noqa: BLE001 - whatever it is, the process that would have died of it says so
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _raise)
    return 0
