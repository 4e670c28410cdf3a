"""Find by bisection the largest stable learning rate of each format and optimizer, and what happens beyond it."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from altgrad.common.console import called
from altgrad.common.errors import UserError, run_stage
from altgrad.common.files import replacing, write_text
from altgrad.config import Params, load_params
from altgrad.reporting.figures import drawing, looks, panels, save
from altgrad.reporting.markdown import Block, Column, Picture, Table, listed, number, plural, to_markdown, words
from altgrad.stability import Edge, Ladder, Search, edge_of

if TYPE_CHECKING:
    from altgrad.execution import Task

PARAMS, RUNS = Path("params.yaml"), Path("data/runs")
OUT = Path("reports/stability")
WITHIN = 0.1  # nats per token
LOWEST, HIGHEST = -8, 12  # rungs that may be asked for
QUESTION = "Up to which learning rate does each format train, and what happens beyond?"

Edges = Mapping[tuple[str, str, str], Edge]  # by variant, format and optimizer


def main(arguments: list[str]) -> None:
    """Run the search for each variant of the settings; write STABILITY.md, results.csv and the figure."""
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
        help="a stable run ends at most this far above the one at the optimizer's own rate; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=OUT, help="folder of table and figure; default: %(default)s")
    options = parser.parse_args(arguments)
    if not options.within > 0:
        raise UserError(f"--within: expected nats above 0, got {options.within}")
    ladder = _ladder(*options.rungs)
    variants = _variants(options.vary)

    from altgrad.execution.settings import change_params  # Hydra, which takes a moment to load

    tables = []
    for variant in variants:
        with _restored(PARAMS):
            scales = ",".join(map(str, ladder.scales))
            change_params(PARAMS, [*options.set_param, *variant, f"grid.lr_scales=[{scales}]"])
            params = load_params()
            tables.append(search(params, ladder, options.within, options.jobs).assign(variant=", ".join(variant)))
    command = f"python -m altgrad.stability {shlex.join(arguments)}".strip()
    write(pd.concat(tables, ignore_index=True), ladder, options.within, options.out, command, _trained(params))
    print(f"written: {options.out / 'STABILITY.md'}")


def search(params: Params, ladder: Ladder, within: float, jobs: int | None) -> pd.DataFrame:
    """Search with the settings ``params``, ``jobs`` runs at a time (None: the fastest number); return a row per run."""
    from altgrad.execution import cells, local

    pool, grid = local.LocalPool(jobs, *params.cell_takes), params.grid
    under_way = Search(grid.formats, grid.optimizers, grid.seeds, ladder, within)
    while needed := under_way.needed():
        cells.run_cells(pool, partial(_of, needed))
        under_way.judge(RUNS)
    return pd.DataFrame(under_way.rows(RUNS))


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
    if not LOWEST <= low <= 0 <= high <= HIGHEST or low == high:
        raise UserError(f"--rungs: expected a range from {LOWEST} to {HIGHEST} that holds 0, got {low} {high}")
    return Ladder(low, high)


def _variants(vary: Sequence[str]) -> list[list[str]]:
    """Return a list of settings per search, such as ``["train.warmup=0"]``: each combination of the values to vary."""
    axes = []
    for setting in vary:
        name, _, values = setting.partition("=")
        if not (name and values):
            raise UserError(f"--vary: expected NAME=A,B,..., such as train.warmup=0,0.1, got {setting}")
        axes.append([f"{name}={value}" for value in values.split(",")])
    return [list(chosen) for chosen in itertools.product(*axes)]


@contextmanager
def _restored(path: Path) -> Iterator[None]:
    """Restore the text of the file ``path`` when the block ends, also after an error."""
    text = path.read_text(encoding="utf-8")
    try:
        yield
    finally:
        write_text(path, text)


def write(rows: pd.DataFrame, ladder: Ladder, within: float, folder: Path, command: str, trained: str) -> None:
    """Write ``results.csv``, ``STABILITY.md`` and the figure into ``folder``.

    Args:
        rows: a row per run, from `search`, with the column ``variant``.
        ladder: the learning rates that the search could try.
        within: the loss, in nats per token, by which a stable run may end above the run at the optimizer's own rate.
        folder: the folder to write into.
        command: the command line that made the rows, shown on the page.
        trained: a sentence on what was trained, shown on the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "results.csv") as path:
        rows.to_csv(path, index=False, lineterminator="\n", float_format="%.7g")
    stable = rows.groupby(["variant", "format", "optimizer", "rung"], sort=False)["stable"].all()
    edges = {
        key: edge_of({int(rung): bool(value) for rung, value in stable[key].items()})
        for key in dict.fromkeys(key[:3] for key in stable.index)
    }
    draw_stability(edges, ladder, folder / "figures")
    note = (
        f"Learning rates are multiples of the optimizer's own, by factors of {number(ladder.factor, 0)}. A rate is "
        f"stable if all of {plural(rows['seed'].nunique(), 'seed')} complete and end at most {within:g} nats per token "
        "above the run of the same seed at the optimizer's own rate. The bisection assumes that stability ends once."
    )
    figure = Picture(
        "stability", "The largest stable learning rate of each format and optimizer, as a multiple of its own rate",
        "Filled: the largest stable rate. Hollow: the lowest unstable rate. An arrow: stable at all rates tried.",
    )  # fmt: skip
    page: list[Block] = [
        "# Stability", f"**{QUESTION}**", figure, "## The numbers", table_of(rows, edges, ladder, note),
        "## How to repeat it", f"{trained} `{command}`",
    ]  # fmt: skip
    write_text(folder / "STABILITY.md", to_markdown(page) + "\n")


def draw_stability(edges: Edges, ladder: Ladder, folder: Path) -> None:
    """Draw the edges, a panel per variant and a line per format and optimizer; save them as ``folder/stability``."""
    variants, entries, arms = (list(dict.fromkeys(key[i] for key in edges)) for i in range(3))
    rows = list(itertools.product(entries, arms))
    with drawing():
        figure, grid = panels(len(variants), 1, 0.7 + 0.32 * len(rows), width=7.0)
        for axes, variant in zip(grid[:, 0], variants, strict=True):
            for y, (entry, arm) in enumerate(rows):
                edge, look = edges.get((variant, entry, arm), Edge(None, None)), looks(entries)[entry]
                if edge.stable is not None:
                    end = edge.unstable if edge.unstable is not None else edge.stable
                    axes.plot([ladder.low, edge.stable], [y, y], color=look.color, linewidth=1.2)
                    axes.plot([edge.stable, end], [y, y], color=look.color, linewidth=0.9, linestyle=":")
                    marker = ">" if edge.unstable is None else look.marker
                    axes.plot(edge.stable, y, color=look.color, marker=marker, markersize=7)
                if edge.unstable is not None:
                    hollow = {"color": look.color, "markerfacecolor": "white", "markersize": 7}
                    axes.plot(edge.unstable, y, marker=look.marker, **hollow)
            axes.set_yticks(range(len(rows)), [f"{entry} {arm}" for entry, arm in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            ticks = range(ladder.low, ladder.high + 1)
            axes.set_xticks(ticks, [f"{ladder.factor**rung:g}" for rung in ticks])
            axes.set(xlabel="learning rate as a multiple of the optimizer's own", title=variant)
        save(figure, folder, "stability")


def table_of(rows: pd.DataFrame, edges: Edges, ladder: Ladder, note: str) -> Table:
    """Return the table of edges, with a row per variant, format and optimizer, and ``note`` below it."""
    varied = any(variant for variant, *_ in edges)
    lines = []
    for (variant, entry, arm), edge in edges.items():
        runs = rows[(rows["variant"] == variant) & (rows["format"] == entry) & (rows["optimizer"] == arm)]
        beyond = runs[(runs["rung"] == edge.unstable) & ~runs["stable"]]
        at_edge = runs[runs["rung"] == edge.stable]["val_loss"].mean()
        lines.append([
            *([variant] if varied else []), f"**{entry}**", f"`{arm}`", _rate(edge, ladder), number(at_edge, 4),
            _what_happens(beyond),
        ])  # fmt: skip
    columns = [
        *([words("settings")] if varied else []), words("format"), words("optimizer"), Column("largest stable rate"),
        Column("validation loss there"), words("at the next rate tried"),
    ]  # fmt: skip
    return Table(columns, lines, note)


def _rate(edge: Edge, ladder: Ladder) -> str:
    if edge.stable is None:
        return f"below {number(ladder.scale(ladder.low), 4)}" if edge.unstable is not None else "–"
    scale = f"{ladder.scale(edge.stable):g}"
    return scale if edge.unstable is not None else f"{scale} or more"


def _what_happens(beyond: pd.DataFrame) -> str:
    """Return how the unstable runs ``beyond`` the edge end, such as ``"diverges (saturation)"``; "–" if none."""
    if beyond.empty:
        return "–"
    ends = Counter(
        f"diverges ({row.signature})" if row.outcome == "diverged" else "ends higher" for row in beyond.itertuples()
    )
    text = listed([end if len(ends) == 1 else f"{end} in {count}" for end, count in ends.items()])
    higher = beyond[beyond["outcome"] != "diverged"]["val_loss"].mean()
    return text if higher != higher else f"{text}, {number(higher, 4)}"


if __name__ == "__main__":
    run_stage(main)
