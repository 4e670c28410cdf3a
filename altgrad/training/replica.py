"""A further process that trains a cell with the stage's own: `altgrad.training.ranks` starts it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from altgrad.common.errors import run_stage
from altgrad.common.files import read_json
from altgrad.config import Cell


def main(arguments: list[str]) -> None:
    """Train the cell of a scratch folder as one of its processes: SCRATCH TOKENS ROOT RANK."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the first process says when to stop
    threading.Thread(target=_end_with_first, daemon=True).start()
    from altgrad.training import Interrupted, ranks
    from altgrad.training.run import make_trainer, settle

    print("here", flush=True)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the first process says it all
    scratch, tokens, root, rank = Path(arguments[0]), Path(arguments[1]), Path(arguments[2]), int(arguments[3])
    cell = Cell.read(scratch / ranks.CELL)
    settled = settle(cell, root)
    vocabulary = read_json(tokens / "meta.json")["vocab_size"]
    with ranks.joined(scratch / ranks.MEETING, rank, cell.train.devices, settled.device) as mine:
        trainer = make_trainer(cell, vocabulary, tokens, scratch, *settled, mine)
        with suppress(Interrupted):
            trainer.run(cell.key)
            mine.alone(trainer.model, lambda: None)  # while the first writes the results


def _end_with_first() -> None:
    """End when the process that started this one closes its end of the pipe, or is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    run_stage(main)
