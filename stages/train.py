"""Stage `train`: train the cell with the given key; write data/runs/<key>."""

import sys
from pathlib import Path

from altgrad.common.errors import UserError, run_stage
from altgrad.common.fingerprint import project_root
from altgrad.config import Cell
from altgrad.config.cell import position_in_grid


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("usage: python -m stages.train CELL, such as E4M3-adamw-0-1")
    key = arguments[0]
    cell = Cell.read(Path("data/grid") / f"{key}.json")
    from altgrad.training import Interrupted, train_cell

    position = position_in_grid(Path("data/grid"), key)
    try:
        train_cell(cell, Path("data/tokens"), Path("data/runs") / key, project_root(), position)
    except Interrupted as interrupted:
        print(interrupted, file=sys.stderr)
        sys.exit(128 + interrupted.signum)


if __name__ == "__main__":
    run_stage(main)
