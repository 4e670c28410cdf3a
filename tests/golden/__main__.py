"""``make golden``: are the results of training to the bit what they were? A minute or two.

Ends with status 1 where anything differs, and names it by run and file.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean

from altgrad.common.files import read_json, write_json
from altgrad.common.machine import usable_cores
from altgrad.config import UserError
from tests.golden.record import difference, machine_class, path_of
from tests.golden.runs import GRID, make_inputs, results, runs

TOP = Path(__file__).parents[2]


def compare(patterns: list[str], write: bool) -> int:
    """Train the miniature grid; compare it with the file of this machine's class, or write that file."""
    name = machine_class()
    path = path_of(name)
    if not (write or path.exists()):
        print(f"no golden file for machines of this class, {name}: `make golden GOLDEN=--write` writes it")
        return 0
    then = read_json(path)["runs"] if path.exists() else {}
    now, differing = {}, set()
    processes = ProcessPoolExecutor(usable_cores(), multiprocessing.get_context("forkserver"))
    with tempfile.TemporaryDirectory() as folder, processes:
        make_inputs(Path(folder))
        chosen = list(runs(Path(folder), *patterns or "*"))
        if not chosen:
            raise UserError(f"no run of {GRID.name} is called {' or '.join(patterns)}, such as 'arms/*'")
        for run, found in zip(chosen, processes.map(partial(results, root=Path(folder)), chosen), strict=True):
            now[run.name] = found
            if then and (said := difference(run.name, then.get(run.name, {}), found)):
                differing.add(run.name)
                print(said, flush=True)
    lost = set() if patterns else then.keys() - now.keys()
    for gone in sorted(lost):
        print(f"{gone}: no longer in grid.yaml")
    print(f"{len(now)} runs, {len(differing | lost)} differ: {name}")
    if write:
        write_json(path, {"class": name, "runs": {**then, **now} if patterns else now})
        return 0
    return int(bool(differing or lost))


def compare_default(project: Path) -> int:
    """Compare the losses of the default grid's runs in ``project``, which have ended, with the committed report.

    The report has each run's to seven digits, and their means over seeds to twelve.
    """
    reported = list(csv.DictReader(_committed("reports/plots/results.csv").splitlines()))
    means = json.loads(_committed("reports/summary.json"))["val_loss"]
    losses, differing = defaultdict(list), 0
    for row in reported:
        key = "-".join(row[name] for name in ("format", "optimizer", "seed", "lr_scale"))
        loss = read_json(project / "data/runs" / key / "metrics.json")["val_loss"]
        losses[row["format"], row["optimizer"]].append(math.nan if loss is None else loss)
        shown = "" if loss is None else f"{loss:.7g}"
        if shown != row["primary"]:
            differing += 1
            print(f"{key}: val_loss {row['primary'] or 'none'} is now {shown or 'none'}")
    for (fmt, arm), found in losses.items():
        if f"{fmean(found):.12g}" != f"{means[fmt][arm]:.12g}":
            print(f"{fmt}-{arm}: the mean of val_loss {means[fmt][arm]:.12g} is now {fmean(found):.12g}")
            differing += 1
    print(f"{len(reported)} runs, {differing} losses and means differ")
    return int(differing > 0)


def _committed(file: str) -> str:
    return subprocess.run(["git", "show", f"HEAD:{file}"], cwd=TOP, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("runs", nargs="*", help="patterns of names, such as 'arms/*'; default: all runs")
    parser.add_argument("--write", action="store_true", help="write the file of this machine's class")
    parser.add_argument("--default", type=Path, metavar="DIR", help="compare the default run in the project at DIR")
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("ALTGRAD_COMPILE_CACHE", str(TOP / "scratch/compiled"))
    try:
        return compare_default(chosen.default) if chosen.default else compare(chosen.runs, chosen.write)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
