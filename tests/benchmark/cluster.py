"""What a Ray cluster costs beside the local pool, and what a large one would take.

    python -m tests.benchmark.cluster [--cells N] [--turns N]

Nodes are Ray's own, all on this machine, so that nothing is won: what is measured is what it costs. Two nodes of one
CPU train the grid of the bench's part `study` that two local jobs train, in turns. Four nodes of two CPUs take a grid
of cells that train nothing. Written: `reports/cluster/cluster.json`, and CLUSTER.md beside it, whose last table
is computed from these numbers and from the cells of the committed study.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from altgrad.benchmark import study
from altgrad.benchmark.pipeline import copy_without_report, make_project, run_all
from altgrad.config import UserError, run_stage
from altgrad.config.files import write_json, write_text

RECORD, PAGE = Path("reports/cluster/cluster.json"), Path("reports/cluster/CLUSTER.md")
MODEL = "pico"
NODES = (1, 8, 64, 512)
CPUS_PER_NODE = 2  # of a machine in the computed table
PRICE = 0.05  # dollars an hour of such a machine, assumed
RAY = ("--engine", "ray")


@contextmanager
def cluster(nodes: int, cpus: int, **variables: str) -> Iterator[str]:
    """Start a Ray cluster of ``nodes`` with ``cpus`` each on this machine; yield its address."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        raise UserError("this bench needs Ray: pip install 'altgrad[ray]'") from None
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=cpus, env_vars=variables)
        yield made.address
    finally:
        made.shutdown()


def training(project: Path, turns: int, cache: Path) -> dict[str, Any]:
    """Return seconds of a grid that trains, by two local jobs and by two nodes, in turns."""
    variables = {"ALTGRAD_COMPILE_CACHE": str(cache.resolve())}
    local: list[float] = []
    remote: list[float] = []
    with tempfile.TemporaryDirectory(prefix="altgrad-cluster-") as name, cluster(2, 1, **variables) as address:
        folder = Path(name)
        copy_without_report(project, folder)
        study.set_grid(folder, MODEL, *study.WARM_UP)
        run_all(folder, "--jobs", "2", **variables)
        count = len(study.SEEDS)
        for turn in range(turns):
            for second, (taken, options) in enumerate(((local, ("--jobs", "2")), (remote, RAY))):
                first = 1 + (2 * turn + second) * count  # other seeds each time: what has run once is in DVC's cache
                study.set_grid(folder, MODEL, list(range(first, first + count)), study.STEPS)
                taken.append(run_all(folder, *options, RAY_ADDRESS=address, **variables))
        cells = len(study.FORMATS) * len(study.ARMS) * count
    return {
        "cells": cells, "steps": study.STEPS, "local_s": _rounded(local), "ray_s": _rounded(remote),
        "overhead": round(statistics.median(remote) / statistics.median(local) - 1, 3),
        "cell_s": round(2 * statistics.median(remote) / cells, 2),
    }  # fmt: skip


def nothing(project: Path, cells: int) -> dict[str, Any]:
    """Return seconds of a grid of ``cells`` that train nothing, on four nodes and by eight local jobs."""
    found: dict[str, Any] = {"cells": cells}
    with cluster(4, 2) as address:
        for name, options in (("local", ("--jobs", "8")), ("ray", RAY)):
            with tempfile.TemporaryDirectory(prefix="altgrad-cluster-") as folder:
                make_project(project, Path(folder), cells)
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                found[f"{name}_s"] = round(run_all(Path(folder), *options, RAY_ADDRESS=address), 1)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the process that plans and hands over: what nodes do belongs to other processes.
    found["driver_cpu_s"] = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
    found["driver_mb"] = round(after.ru_maxrss * 1024 / 1e6)
    return found


def _rounded(seconds: list[float]) -> list[float]:
    return [round(value, 1) for value in seconds]


def projected(record: dict[str, Any], cells: int) -> list[dict[str, Any]]:
    """Return what ``cells`` would take on `NODES` machines: hours, dollars, and what holds them back."""
    slots, cell = CPUS_PER_NODE, record["training"]["cell_s"]
    per_cell = record["nothing"]["driver_cpu_s"] / record["nothing"]["cells"]
    rows = []
    for nodes in NODES:
        limits = {"training": math.ceil(cells / (nodes * slots)) * cell, "planning and hand-over": cells * per_cell}
        took = max(limits.values())
        rows.append({
            "nodes": nodes, "hours": took / 3600, "dollars": nodes * took / 3600 * PRICE,
            "bound": max(limits, key=limits.__getitem__),
        })  # fmt: skip
    return rows


def page(record: dict[str, Any], cells: int) -> str:
    """Return the page about the record, as Markdown."""
    trained, empty = record["training"], record["nothing"]
    spread = {name: f"{min(trained[name])} to {max(trained[name])}" for name in ("local_s", "ray_s")}
    rows = [
        f"| {row['nodes']} | {_duration(row['hours'])} | {row['dollars']:.2f} | {row['bound']} |"
        for row in projected(record, cells)
    ]
    local, remote = (statistics.median(trained[name]) for name in ("local_s", "ray_s"))
    return f"""# What a cluster costs

Made by `python -m tests.benchmark.cluster` on {record["machine"]}, {record["date"]}. All nodes are on that machine,
so that nothing is won by them.

- **A grid that trains.** {trained["cells"]} cells of `{MODEL}`, {trained["steps"]} steps each, in turns: two local jobs
  took {local:.1f} s ({spread["local_s"]}), two nodes of one CPU {remote:.1f} s ({spread["ray_s"]}):
  {100 * trained["overhead"]:+.1f} %, each time with other seeds. The cluster was up already; connecting to it and
  starting a process on each node is counted.
- **Cells that train nothing.** {empty["cells"]:,} of them, trained and diagnosed, took four nodes of two CPUs
  {empty["ray_s"]} s, and eight local jobs {empty["local_s"]} s, all on the same cores. The process that plans and
  hands over computed for {empty["driver_cpu_s"]} s, and had a peak of memory of at most {empty["driver_mb"]} MB.

## Computed, not measured

The {cells:,} cells of the committed study, each as long as one above, on machines of {CPUS_PER_NODE} such CPUs at
{PRICE} dollars an hour (assumed):

| machines | time | dollars | bound by |
|---:|---:|---:|---|
{chr(10).join(rows)}
"""


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.cluster", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", type=int, default=1000, metavar="N", help="cells that train nothing; default 1000")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="runs that train, of each kind; default 3")
    options = parser.parse_args(arguments)
    if min(options.cells, options.turns) < 1:
        raise UserError("--cells and --turns: expected 1 or more")
    from altgrad.training.machine import compile_cache, processor_name

    project = Path()
    record = {
        "machine": processor_name(), "date": time.strftime("%Y-%m-%d"),
        "training": training(project, options.turns, compile_cache(project)),
        "nothing": nothing(project, options.cells),
    }  # fmt: skip
    write_json(RECORD, record)
    write_text(PAGE, page(record, study_cells()))
    print(PAGE.read_text())


def study_cells(table: Path = Path("reports/study/results/runs.csv")) -> int:
    """Return how many runs the committed study has: the rows of its table."""
    return len(table.read_text().splitlines()) - 1


if __name__ == "__main__":
    run_stage(main)
