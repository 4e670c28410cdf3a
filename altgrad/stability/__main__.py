"""Find the largest stable learning rate of each format and optimizer, by bisection, and what happens beyond it."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from altgrad.common.console import called
from altgrad.common.errors import UserError, run_stage
from altgrad.common.files import write_text
from altgrad.config import Params, load_params
from altgrad.stability.search import Ladder

if TYPE_CHECKING:
    from altgrad.execution.executor import Task

PARAMS, RUNS = Path("params.yaml"), Path("data/runs")
OUT = Path("reports/stability")
WITHIN = 0.1  # nats per token
FEWEST, MOST = -8, 12  # rungs of a ladder that anybody may ask for


def main(arguments: list[str]) -> None:
    """Search, and write the table and the figure."""
    parser = argparse.ArgumentParser(prog=called("stability"), description=__doc__)
    parser.add_argument("--jobs", type=int, metavar="N", help="training runs at a time; default: what is fastest here")
    parser.add_argument(
        "--rungs", type=int, nargs=2, default=(-3, 6), metavar=("LOW", "HIGH"),
        help="search the optimizer's own rate times 2^LOW to 2^HIGH; default: -3 6",
    )  # fmt: skip
    parser.add_argument(
        "-S", "--set-param", action="append", default=[], metavar="NAME=VALUE",
        help="change a setting of params.yaml for this search alone; may be given many times",
    )  # fmt: skip
    parser.add_argument(
        "--vary", action="append", default=[], metavar="NAME=A,B,...",
        help="search anew for each value of a setting, such as train.warmup=0,0.1; may be given many times",
    )  # fmt: skip
    parser.add_argument(
        "--within", type=float, default=WITHIN, metavar="NATS",
        help="a stable run's loss is at most so far above that at the optimizer's own rate; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUT, help="folder of table and figure; default: %(default)s")
    options = parser.parse_args(arguments)
    if not options.within > 0:
        raise UserError(f"--within: expected nats above 0, got {options.within}")
    ladder = _ladder(*options.rungs)
    variants = _variants(options.vary)

    from altgrad.execution.settings import change_params  # Hydra, which takes a moment to load
    from altgrad.stability.page import write

    found = []
    for variant in variants:
        with _restored(PARAMS):
            scales = ",".join(map(str, ladder.scales))
            change_params(PARAMS, [*options.set_param, *variant, f"grid.lr_scales=[{scales}]"])
            found.append(search(ladder, options.within, options.jobs).assign(variant=", ".join(variant)))
            trained = _trained(load_params())
    rows = pd.concat(found, ignore_index=True)
    command = f"python -m altgrad.stability {shlex.join(arguments)}".strip()
    write(rows, ladder, options.within, options.out, command, trained)
    print(f"the stability of {rows['format'].nunique()} formats: {options.out / 'STABILITY.md'}")


def search(ladder: Ladder, within: float, jobs: int | None) -> pd.DataFrame:
    """Search with the settings of params.yaml; return a row per run."""
    from altgrad.execution import cells, local
    from altgrad.stability.search import Search

    params = load_params()
    pool = local.LocalPool(jobs, *params.cell_takes)
    grid = params.grid
    found = Search(grid.formats, grid.optimizers, grid.seeds, ladder, within)
    while needed := found.needed():
        cells.run_cells(pool, partial(_of, needed))
        found.judge(RUNS)
    return pd.DataFrame(found.rows(RUNS))


def _of(keys: Container[str], tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.key in keys]


def _trained(params: Params) -> str:
    train = params.train
    sequences = train.batch * train.grad_accumulation
    return (
        f"Model `{params.model}`, corpus `{params.corpus}`, {train.steps} steps of {sequences} sequences, seeds "
        f"{', '.join(map(str, params.grid.seeds))}; the other settings are those of params.yaml."
    )


def _ladder(low: int, high: int) -> Ladder:
    if not FEWEST <= low <= 0 <= high <= MOST or low == high:
        raise UserError(f"--rungs: expected a range from {FEWEST} to {MOST} that holds 0, got {low} {high}")
    return Ladder(low, high)


def _variants(vary: Sequence[str]) -> list[list[str]]:
    """Return the settings of each search: every combination of the values that are varied."""
    axes = []
    for given in vary:
        name, _, values = given.partition("=")
        if not (name and values):
            raise UserError(f"--vary: expected NAME=A,B,..., such as train.warmup=0,0.1, got {given}")
        axes.append([f"{name}={value}" for value in values.split(",")])
    return [list(chosen) for chosen in itertools.product(*axes)]


@contextmanager
def _restored(path: Path) -> Iterator[None]:
    """Leave ``path`` in the end as it was."""
    text = path.read_text(encoding="utf-8")
    try:
        yield
    finally:
        write_text(path, text)


if __name__ == "__main__":
    run_stage(main)
