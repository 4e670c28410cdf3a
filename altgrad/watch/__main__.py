"""Serve a page that follows the runs while they train: losses, the comparison so far, time left."""

from __future__ import annotations

import argparse
import errno
import signal
from contextlib import suppress
from pathlib import Path

from altgrad.common.console import called, handled
from altgrad.common.errors import UserError, run_stage
from altgrad.config import load_params
from altgrad.watch.events import Events
from altgrad.watch.server import Server

PORT = 8765


def main(arguments: list[str]) -> None:
    """Serve the page until it is interrupted."""
    parser = argparse.ArgumentParser(prog=called("watch"), description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help="0: any that is free; default: %(default)s")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65_535:
        raise UserError(f"--port: expected 0 to 65535, got {options.port}")
    try:
        price = load_params().budget.price if Path("params.yaml").exists() else 0.0  # else runs of other programs
        server = Server(Events(Path(), price), options.port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges"
        raise UserError(f"--port: {options.port} {why}; another, or 0 for a free one, will do") from None
    print(f"The page: {server.url} (for this machine alone; Ctrl-C ends it, and no cell)", flush=True)
    # Also where the shell has it ignore Ctrl-C, as one in the background.
    with suppress(KeyboardInterrupt), handled(signal.default_int_handler), server:
        server.serve_forever()


if __name__ == "__main__":
    run_stage(main)
